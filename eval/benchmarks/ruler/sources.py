"""The sources of RULER's rows: the official prompts and settings, word lists, and the corpora of some tasks."""

import bisect
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from eval.benchmarks.downloads import HubDataset, literals, official_file
from eval.benchmarks.rows import check_fields, is_text, parsed_json
from eval.benchmarks.suite import Dataset, DataSettings
from lazyllm.errors import UserError, reason_of, require

COMMIT = "c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a"  # of NVIDIA/RULER: of prompts, settings and rows

TASKS = (
    *(f"niah_{kind}_{number}" for kind in ("single", "multikey") for number in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)

# {file: (its folder in the repository, its sha256)}
OFFICIAL = {
    "constants.py": ("scripts/data/synthetic", "6296e901d495ec6200dc3f68993ea13d8282e3c0dbe1a8c47967f111105d1fde"),
    "synthetic.yaml": ("scripts", "34bc71dcacdc41a829a170f04b528fbf48d62c616338005ab4991680fbf8cb0b"),
}
# Of both files, one after the other
OFFICIAL_SHA256 = "92afc45cbdaddfd043fb3cc4706500f8cf8811508ed14cfee8be345b8eaaa08b"
_ESSAYS, _ENGLISH = "PaulGrahamEssays.json", "english_words.json"
_GIVE_ESSAY = f"give ruler.haystack=FILE or FOLDER of text, or data.dir=FOLDER with RULER's {_ESSAYS}"
_HUB = {  # dataset of a qa task: (on the hub, configuration, file in data.dir)
    "squad": (HubDataset("rajpurkar/squad_v2", "RULER's squad.json"), None, "squad.json"),
    "hotpotqa": (HubDataset("hotpotqa/hotpot_qa", "RULER's hotpotqa.json"), "distractor", "hotpotqa.json"),
}
INSTALL = "install it with: pip install 'lazyllm-bench[ruler]'"


@dataclass(frozen=True)
class Task:
    """The official prompt and settings of one task. Texts have placeholders such as `{context}`."""

    name: str
    kind: str  # of its generator: a key of `constants.py`
    template: str
    answer_prefix: str  # the text after the prompt and the chat template, which the answer continues
    max_new_tokens: int  # `tokens_to_generate`
    settings: Mapping[str, Any]  # its `args` in `synthetic.yaml`


@dataclass(frozen=True)
class Essay:
    """The text around needles, as words. official: whether it comes from RULER's `PaulGrahamEssays.json`."""

    words: Sequence[str]
    official: bool

    def sentences(self, count: int) -> list[str]:
        """The sentences of the first `count` words; the text is repeated if necessary.

        The official corpus is split by NLTK's punkt model, as in RULER. Ours: other text is split after ". ", "! " and
        "? ", which needs no model. The sentences only determine where a needle can be.
        """
        text = " ".join(itertools.islice(itertools.cycle(self.words), count)).strip()
        if not self.official:
            return re.split(r"(?<=[.!?]) ", text)
        from nltk.tokenize import sent_tokenize

        try:
            return sent_tokenize(text)
        except LookupError as error:
            how = "is split by NLTK's punkt model, which is missing: python -m nltk.downloader punkt_tab"
            raise UserError(f"RULER's {_ESSAYS} {how}") from error


@dataclass(frozen=True)
class QaQuestion:
    """A question. documents, more, evidence: indices of its documents, others of the same article, the answer's."""

    text: str
    outputs: tuple[str, ...]
    documents: tuple[int, ...]
    more: tuple[int, ...]
    evidence: tuple[int, ...]


Corpus = tuple[list[QaQuestion], list[str]]  # of a qa task: questions in their order, and sorted documents


def read_tasks(folder: Path | None) -> dict[str, Task]:
    """{name: task}, from a folder with RULER's `constants.py` and `synthetic.yaml`; None downloads these files once.

    Raises UserError if a file is missing, cannot be downloaded, or is not that of `COMMIT`.
    """
    give, base = f"RULER's {' and '.join(OFFICIAL)}", f"https://raw.githubusercontent.com/NVIDIA/RULER/{COMMIT}"
    return parse_tasks(
        *(
            official_file("RULER", name, f"{base}/{path}/{name}", sha256, folder, give, exact=True)
            for name, (path, sha256) in OFFICIAL.items()
        )
    )


@cache  # 13 datasets are checked, loaded and asked for their corpus
def parse_tasks(prompts: bytes, settings: bytes) -> dict[str, Task]:
    """The tasks of `constants.py`, whose code is not run, and `synthetic.yaml`."""
    import yaml

    (kinds,), chosen = literals(prompts, "TASKS"), yaml.safe_load(settings)
    tasks = {}
    for name in TASKS:
        kind = chosen[name]["task"]
        prompt = kinds[kind]["template"], kinds[kind]["answer_prefix"], kinds[kind]["tokens_to_generate"]
        tasks[name] = Task(name, kind, *prompt, chosen[name]["args"])
    return tasks


def words(*kinds: Literal["noun", "adjective", "verb"]) -> list[list[str]]:
    """The lists of the wonderwords package. Raises UserError if the package is not installed."""
    from importlib.resources import files

    try:
        folder = files("wonderwords") / "assets"
    except ModuleNotFoundError as error:
        raise UserError(f"RULER's words come from the package wonderwords, which is missing; {INSTALL}") from error
    return [[line.rstrip() for line in (folder / f"{kind}list.txt").read_text("utf-8").splitlines()] for kind in kinds]


def _given(settings: DataSettings, name: str) -> Path | None:
    """A file of `data.dir`; None if it does not exist."""
    file = settings.dir and settings.dir.expanduser() / name
    return file if file and file.is_file() else None


def _essay_file(settings: DataSettings) -> Path | None:
    """The setting `haystack`, else RULER's essays in `data.dir`, else None."""
    haystack = settings.options.haystack
    return _given(settings, _ESSAYS) if haystack is None else Path(haystack).expanduser()


def english_words(settings: DataSettings) -> list[str]:
    """The longer word list, for rows that need more words than wonderwords has. Raises UserError if it is missing."""
    file = _given(settings, _ENGLISH)
    if file is None:
        raise UserError(
            f"cwe needs more words at this length than wonderwords has: give data.dir=FOLDER with {_ENGLISH} from "
            "RULER's repository (scripts/data/synthetic/json, stored with Git LFS), or a smaller ruler.length"
        )
    listed = parsed_json(_content(file), str(file))
    if not isinstance(listed, dict) or not all(isinstance(word, str) for word in listed.values()):
        raise UserError(f"{file}: expected one JSON object whose values are words (is it a Git LFS pointer?)")
    return list(listed.values())


class Pairs(Sequence[str]):
    """All distinct "adjective-noun" pairs, sorted: six million strings, each made when it is read."""

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        ends, beginnings = sorted(set(nouns)), sorted(f"{adjective}-" for adjective in set(adjectives))
        # pairs of adjectives with the same first word ("well", "well-made") mix, and have no common beginning
        blocks = [[*group] for _, group in itertools.groupby(beginnings, lambda beginning: beginning.partition("-")[0])]
        # (beginning, the sorted rests of its pairs)
        self._blocks = [
            (block[0], ends) if len(block) == 1 else ("", sorted({first + end for first in block for end in ends}))
            for block in blocks
        ]
        self._ends = list(itertools.accumulate(len(rests) for _, rests in self._blocks))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect.bisect_right(self._ends, index)
        beginning, rests = self._blocks[number]
        return beginning + rests[index - self._ends[number]]  # counted from the block's end


def read_essay(task: str, settings: DataSettings) -> Essay:
    """The text around a task's needles. Raises UserError if it is missing or cannot be read."""
    path = _essay_file(settings)
    if path is None:
        raise UserError(f"{task} hides its needles in a text: {_GIVE_ESSAY}")
    official = path.suffix == ".json"
    if official:
        content = parsed_json(_content(path), str(path))
        check_fields(content, {"text": (is_text, f"a string, as in RULER's {_ESSAYS}")})
        text = content["text"]
    else:
        text = read_text(path, "ruler.haystack")
    return Essay(re.sub(r"\s+", " ", text).split(" "), official)


def read_text(path: Path, key: str) -> str:
    """The text of a file, or of a folder's .txt and .md files. key: the path's setting. Raises UserError if empty."""
    files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md")) if path.is_dir() else [path]
    text = " ".join(_content(file, as_text=True) for file in files).strip()
    if not text:
        raise UserError(f"{path}: no text to hide needles in; give {key}=FILE or FOLDER of .txt or .md files")
    return text


def check_haystack(suite: str, path: str | None) -> None:
    """Refuse a suite's setting `haystack` if there is no such file or folder. Raises UserError."""
    exists = path is None or Path(path).expanduser().exists()
    require(exists, f"{suite}.haystack", path, "a text file or a folder, but it does not exist")


def missing(dataset: Dataset, settings: DataSettings) -> str | None:
    """Why a task's text or dataset cannot be loaded; None if it can, or if the task does not need any."""
    task = read_tasks(settings.dir)[dataset.name]
    if task.settings.get("type_haystack") == "essay":
        return f"no text to hide needles in; {_GIVE_ESSAY}" if _essay_file(settings) is None else None
    if task.kind != "qa":
        return None
    hub, _, name = _HUB[task.settings["dataset"]]
    return hub.absent() if _given(settings, name) is None else None


def corpus_sha256(task: Task, settings: DataSettings) -> str | None:
    """SHA-256 of a task's text or dataset; None if it does not need any."""
    if task.settings.get("type_haystack") == "essay":
        essay = read_essay(task.name, settings)
        texts = [str(essay.official), *essay.words]
    elif task.kind == "qa":
        questions, documents = read_corpus(task.settings["dataset"], settings)
        texts = [*documents, *map(repr, questions)]
    else:
        return None
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogatepass")).hexdigest()


def read_corpus(dataset: str, settings: DataSettings) -> Corpus:
    """Questions and documents of the development set of SQuAD 2.0 or HotpotQA (distractor).

    dataset: "squad" or "hotpotqa", read from its file in `data.dir` if it exists, else by the package `datasets`.
    Raises UserError if the file is malformed, or if the dataset is neither cached nor downloadable.
    """
    hub, configuration, name = _HUB[dataset]
    file = _given(settings, name)
    if file is not None:
        content, source = parsed_json(_content(file), str(file)), str(file)
    else:
        content, source = hub.split(configuration, "validation"), hub.repository
    try:
        if dataset == "squad":
            corpus = _squad([*_squad_rows(content)] if isinstance(content, dict) else [*content])
        else:
            corpus = _hotpotqa(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{source}: not in the official format of {dataset} ({error!r})") from error
    if not corpus[0]:
        raise UserError(f"{source}: holds no question with an answer")
    return corpus


def _squad_rows(content: Any) -> Iterator[dict[str, Any]]:
    """The questions of the official file as rows of the hub."""
    for article in content["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                texts = [] if asked["is_impossible"] else [answer["text"] for answer in asked["answers"]]
                yield {**asked, "title": article["title"], "context": paragraph["context"], "answers": {"text": texts}}


def _squad(rows: list[Any]) -> Corpus:
    documents = sorted({row["context"] for row in rows})
    index = {document: number for number, document in enumerate(documents)}
    questions = []
    for _, grouped in itertools.groupby(rows, key=lambda row: row["title"]):
        article = list(grouped)
        numbers = dict.fromkeys(index[row["context"]] for row in article)
        for row in article:
            if texts := row["answers"]["text"]:
                own = index[row["context"]]
                more = tuple(number for number in numbers if number != own)
                questions.append(QaQuestion(row["question"], tuple(texts), (own,), more, (own,)))
    return questions, documents


def _hotpotqa(content: Any) -> Corpus:
    def pairs(value: Any, second: str) -> list[Any]:
        """Of a title and another value: the hub has a column of each instead."""
        return list(zip(value["title"], value[second], strict=True)) if isinstance(value, dict) else value

    contexts = [
        [(title, f"{title}\n{''.join(sentences)}") for title, sentences in pairs(asked["context"], "sentences")]
        for asked in content
    ]
    documents = sorted({text for context in contexts for _, text in context})
    index = {text: number for number, text in enumerate(documents)}
    questions = []
    for asked, context in zip(content, contexts, strict=True):
        supporting = {title for title, _ in pairs(asked["supporting_facts"], "sent_id")}
        numbers = tuple(index[text] for _, text in context)
        evidence = tuple(number for number, (title, _) in zip(numbers, context, strict=True) if title in supporting)
        questions.append(QaQuestion(asked["question"], (asked["answer"],), numbers, (), evidence))
    return questions, documents


def _content(file: Path, as_text: bool = False) -> Any:
    try:
        return file.read_text("utf-8") if as_text else file.read_bytes()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({reason_of(error)})") from error
