"""LongBench (arXiv 2308.14508): its 16 English and code datasets, and LongBench-E.

A folder (`data.dir=FOLDER`) holds `<dataset>.jsonl`, `config/dataset2prompt.json` and
`config/dataset2maxlen.json`. Without one, rows come from the hub's archive (`THUDM/LongBench`,
`data.zip`) and the two config files from LongBench's repository; both are pinned by commit and
sha256 and downloaded once. Prompts and answers are treated as in `pred.py`, `eval.py` and `config/`
(commit 2e00731).

The archive is read here, not by the package `datasets`, whose reader of JSON changes texts: a field
that is a date in all rows of a file, such as "2020-01-05", becomes "2020-01-05 00:00:00", and half
a surrogate pair ends the whole file.

LongBench-E: 13 of the datasets, with other rows (the `_e` files), about as many short as long ones;
scores by length. Lengths are the rows' `length`, in words; the bounds are those of `eval.py`. Ours:
scores are added one by one, as in LongBench. `scorer_e` takes NumPy's mean, which may differ in its
last bit: a score halfway between two is then rounded to the other one, 0.01 away.

`subset=mini` takes the 187 rows that MiniLongBench (ACL 2025, arXiv 2505.19959) chose to stand for
LongBench. `minilongbench.json` holds hashes of these rows' content, never the rows. They are found
in `data.dir`, else in the archive if it is in the cache, else in `linggm/MiniLongBench`, which is
1/10 of its size.
"""

import hashlib
import json
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from eval.benchmarks.downloads import (
    cached_file,
    given_file,
    hub_file,
    official_cache,
    official_file,
)
from eval.benchmarks.rows import Check, check_fields, is_text, load_lines, parsed_json, sha256_of
from eval.benchmarks.suite import (
    Dataset,
    DataSettings,
    LoadedDataset,
    Published,
    Suite,
    register,
)
from lazyllm.errors import UserError

HUB_REPOSITORY, HUB_FILE = "THUDM/LongBench", "data.zip"
HUB_REVISION = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
HUB_SHA256 = "cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64"
COMMIT = "2e00731f8d0bff23dc4325161044d0ed8af94c1e"
CONFIG_URL = f"https://raw.githubusercontent.com/THUDM/LongBench/{COMMIT}/LongBench/config/"
PROMPTS, MAX_LENGTHS = "dataset2prompt.json", "dataset2maxlen.json"
CONFIG_SHA256 = {
    PROMPTS: "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30",
    MAX_LENGTHS: "72966b3c0933e214591637fb085798c5e687ebff4ddaab5d99bbc31120532022",
}
MINI = "mini"
MINI_REPOSITORY = "linggm/MiniLongBench"  # its rows are checked one by one: no revision is pinned

_CHECKS: dict[str, Check] = {  # of a dataset's entry in the config files
    PROMPTS: (
        lambda value: is_text(value) and value.count("{context}") == 1,
        "a prompt with {context}, once",
    ),
    MAX_LENGTHS: (
        lambda value: type(value) is int and value > 0,
        "a number of tokens of at least 1",
    ),
}
_GIVE = f"LongBench's <dataset>.jsonl, config/{PROMPTS} and config/{MAX_LENGTHS}"

# What prompts and answers of a task, or of a dataset, have of their own: fields of `Dataset`
_OWN: dict[str, dict[str, Any]] = {
    "few_shot": {"chat_wrap": False, "first_line": True},
    "code": {"chat_wrap": False},
    # "Question: ..." and "Type: ..." in turn, a line each
    "trec": {"protected": r"^Question:|^Type:.*"},
    # "Passage:", lines of text, "Question:", a line, "Answer:", a line. Only the text may be
    # shortened, not the question
    "triviaqa": {"protected": r"^Passage:$|^Question:\n.*\nAnswer:\n.*"},
    # "Dialogue: ", lines of talk, "Summary: ", as a rule one line
    "samsum": {
        "protected": r"^Dialogue:|^Summary:[\s\S]*?(?=^Dialogue:|\Z)",
        "newline_ends": True,
    },
}

# {dataset: (task, metric, examples, mean words of one, most tokens of an answer)}: words by Table 1
# of the paper, tokens by config/dataset2maxlen.json
_FACTS = {
    "narrativeqa": ("single_doc_qa", "f1", 200, 18_409, 128),
    "qasper": ("single_doc_qa", "f1", 200, 3_619, 128),
    "multifieldqa_en": ("single_doc_qa", "f1", 150, 4_559, 64),
    "hotpotqa": ("multi_doc_qa", "f1", 200, 9_151, 32),
    "2wikimqa": ("multi_doc_qa", "f1", 200, 4_887, 32),
    "musique": ("multi_doc_qa", "f1", 200, 11_214, 32),
    "gov_report": ("summarization", "rouge", 200, 8_734, 512),
    "qmsum": ("summarization", "rouge", 200, 10_614, 512),
    "multi_news": ("summarization", "rouge", 200, 2_113, 512),
    "trec": ("few_shot", "classification", 200, 5_177, 64),
    "triviaqa": ("few_shot", "f1", 200, 8_209, 32),
    "samsum": ("few_shot", "rouge", 200, 6_258, 128),
    "passage_count": ("synthetic", "count", 200, 11_141, 32),
    "passage_retrieval_en": ("synthetic", "retrieval", 200, 9_289, 32),
    "lcc": ("code", "code_similarity", 500, 1_235, 64),
    "repobench-p": ("code", "code_similarity", 500, 4_206, 64),
}

DATASETS = tuple(
    Dataset(name, task, metric, "longbench", **_OWN.get(task, {}), **_OWN.get(name, {}))
    for name, (task, metric, *_) in _FACTS.items()
)
PUBLISHED = {
    # tokens a word by Llama 2's tokenizer, measured on 89 of the rows
    name: Published(examples, words, max_new_tokens, 3.5 if task == "code" else 1.6)
    for name, (task, _, examples, words, max_new_tokens) in _FACTS.items()
}


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """Load one dataset, from a folder or the hub.

    Raises UserError for an unusable row (unless skipped) or file, and for a row of the subset that
    is not there.
    """
    data, source = _rows(dataset, settings)
    name = dataset.name.removesuffix("_e")
    template, max_new_tokens = (_entry(file, name, settings.dir) for file in _CHECKS)
    loaded = load_lines(dataset, data, source, template, max_new_tokens, settings.on_error)
    return _in_mini(loaded) if settings.subset == MINI else loaded


def _rows(dataset: Dataset, settings: DataSettings) -> tuple[bytes, str]:
    """The lines of a dataset, and where they come from."""
    member = f"data/{dataset.name}.jsonl"
    if settings.dir is not None:
        file = given_file(settings.dir, f"{dataset.name}.jsonl", _GIVE)
    elif settings.subset == MINI and cached_file(HUB_REPOSITORY, HUB_FILE, HUB_REVISION) is None:
        file = hub_file(MINI_REPOSITORY, member, None, _GIVE)
    else:
        archive = _archive()
        with zipfile.ZipFile(archive) as opened:
            return opened.read(member), f"{archive}:{member}"
    return file.read_bytes(), str(file)


def _entry(file: str, dataset: str, folder: Path | None) -> Any:
    """A dataset's entry in one of LongBench's config files."""
    path = f"config/{file}"
    data = official_file("LongBench", path, CONFIG_URL + file, CONFIG_SHA256[file], folder, _GIVE)
    try:
        content = parsed_json(data)
        check_fields(content, {dataset: _CHECKS[file]})
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return content[dataset]


def _archive() -> Path:
    """The hub's archive, in the hub's cache; downloaded if necessary."""
    archive = hub_file(HUB_REPOSITORY, HUB_FILE, HUB_REVISION, _GIVE)
    if _archive_sha256(archive, archive.stat().st_mtime_ns) != HUB_SHA256:
        differs = f"{archive}: not LongBench's own (its sha256 differs)"
        raise UserError(f"{differs}: delete it, and it is downloaded again")
    return archive


@cache
def _archive_sha256(archive: Path, modified: int) -> str:
    """Computed once for all datasets of a run: the archive has 114 MB."""
    with archive.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@cache
def _mini() -> dict[str, Any]:
    """{dataset: {"words": mean of a row, "rows": hashes of content}} of MiniLongBench."""
    return json.loads(Path(__file__).with_name("minilongbench.json").read_bytes())


def _content_sha256(row: Mapping[str, Any]) -> str:
    """16 hex digits that identify a row, whose `_id` and place differ from copy to copy."""
    return sha256_of([row["context"], row["input"], row["answers"]])[:16]


def _in_mini(loaded: LoadedDataset) -> LoadedDataset:
    """The rows of MiniLongBench, in its order. Raises UserError if one is not there."""
    name = loaded.dataset.name
    wanted = _mini()[name]["rows"]
    found = {_content_sha256(example.official): example for example in reversed(loaded.examples)}
    if missing := [row for row in wanted if row not in found]:
        raise UserError(
            f"{loaded.source}: {len(missing)} of the {len(wanted)} rows of {name} in subset={MINI} "
            f"are missing: give LongBench's own rows or those of {MINI_REPOSITORY}"
        )
    examples = tuple(found[row] for row in wanted)
    data_sha256 = sha256_of([example.official for example in examples])
    total = PUBLISHED[name].examples
    return replace(loaded, examples=examples, data_sha256=data_sha256, total=total)


def load_e(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """Load one dataset, each row in the group of its length. Raises UserError as `load`."""
    loaded, examples = load(dataset, settings), []
    for row in loaded.examples:
        group = "0-4k" if row.length < 4000 else "4-8k" if row.length < 8000 else "8k+"
        examples.append(replace(row, groups=(f"length={group}",)))
    return replace(loaded, examples=tuple(examples))


def published(settings: DataSettings) -> Mapping[str, Published]:
    """Return the sizes of the datasets, of the subset if the settings name one."""
    if settings.subset != MINI:
        return PUBLISHED
    return {
        name: replace(size, examples=len(_mini()[name]["rows"]), words=_mini()[name]["words"])
        for name, size in PUBLISHED.items()
    }


def is_cached(settings: DataSettings) -> bool:
    """Whether the rows and the config files are in the caches."""
    config = official_cache("LongBench") / "config"
    if not all((config / name).is_file() for name in CONFIG_SHA256):
        return False
    if cached_file(HUB_REPOSITORY, HUB_FILE, HUB_REVISION) is not None:
        return True
    rows = (cached_file(MINI_REPOSITORY, f"data/{name}.jsonl") for name in PUBLISHED)
    return settings.subset == MINI and None not in rows


SUITE = register(
    Suite(
        name="longbench",
        datasets=DATASETS,
        load=load,
        subsets=(MINI,),
        published=published,
        cached=is_cached,
    )
)

SUITE_E = register(
    Suite(
        name="longbench_e",
        datasets=tuple(
            replace(dataset, name=f"{dataset.name}_e", suite="longbench_e")
            for dataset in DATASETS
            if dataset.name not in ("narrativeqa", "musique", "qmsum")
        ),
        load=load_e,
        cached=is_cached,
    )
)
