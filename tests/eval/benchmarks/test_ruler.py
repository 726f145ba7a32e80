"""RULER's rows against official ones, and properties of every row at any length and for any tokenizer."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks.ruler import RulerConfig, generator, sources
from eval.benchmarks.ruler.sources import TASKS, read_tasks
from eval.benchmarks.suite import DataSettings
from lazyllm.errors import UserError
from tests.eval.official import SHARED

OFFICIAL_ROWS = sorted((SHARED / "ruler" / "rows").glob("*/*.jsonl"))
NEEDS_SHARED = pytest.mark.skipif(not OFFICIAL_ROWS, reason="../shared/ruler is absent")

PROMPTS = {  # our own words, with the official placeholders
    "niah": (
        128,
        "Some {type_needle_v} are hidden here.\n{context}\nWhat are all the {type_needle_v} for {query}?",
        " The {type_needle_v} for {query} are",
    ),
    "variable_tracking": (30, "Track the names.\n\n{context}\nWhich names mean {query}?", " Answer: the {num_v} are: "),
    "common_words_extraction": (120, "A list.\n{context}\nWhich 10 words are common?", " Answer: they are:"),
    "freq_words_extraction": (50, "A code. {context}\nWhich three words are frequent?", " Answer: they are:"),
    "qa": (32, "Documents follow.\n\n{context}\n\nQuestion: {query}", " Answer:"),
}
NEEDLES = {  # haystack, keys, values, keys in the text, values of each, keys asked for
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 1, 1, 4),
}
NEEDLE_FIELDS = ("type_haystack", "type_needle_k", "type_needle_v", "num_needle_k", "num_needle_v", "num_needle_q")
OTHER_TASKS = {
    "vt": ("variable_tracking", {"type_haystack": "noise", "num_chains": 1, "num_hops": 4}),
    "cwe": ("common_words_extraction", {"freq_cw": 30, "freq_ucw": 3, "num_cw": 10}),
    "fwe": ("freq_words_extraction", {"alpha": 2.0}),
    "qa_1": ("qa", {"dataset": "squad"}),
    "qa_2": ("qa", {"dataset": "hotpotqa"}),
}
SETTINGS = {
    name: {"task": "niah", "args": dict(zip(NEEDLE_FIELDS, values, strict=True))} for name, values in NEEDLES.items()
} | {name: {"task": kind, "args": args} for name, (kind, args) in OTHER_TASKS.items()}

SENTENCES = [f"The {number} wolves of {place} ran." for number in range(40) for place in ("Oslo", "Rome", "Lima")]


def paragraph(article: int, number: int) -> dict[str, Any]:
    golds = [{"text": f"{number} wolves"}, {"text": "wolves"}]
    return {
        "context": f"Paragraph {number} of {article}: {' '.join(SENTENCES[number : number + 4])}",
        "qas": [
            {"question": f"Why {number}?", "answers": [], "is_impossible": True},
            {"question": f"Who is in {number} of {article}?", "answers": golds, "is_impossible": False},
        ],
    }


SQUAD = {
    "data": [
        {"title": f"Article {article}", "paragraphs": [paragraph(article, number) for number in range(15)]}
        for article in range(8)
    ]
}
HOTPOTQA = [
    {
        "question": f"Which is {number}?",
        "answer": f"answer {number}",
        "context": [
            [f"Title {number}-{place}", [SENTENCES[place], f" Here is answer {number}."]] for place in range(10)
        ],
        "supporting_facts": [[f"Title {number}-3", 1], [f"Title {number}-8", 0]],
    }
    for number in range(30)
]


class WordTokenizer:
    """Each word, mark and white space is a token: nothing is merged across white space."""

    pattern = re.compile(r"[A-Za-z]{1,5}|\d|[^\w\s]|_|\n")

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[str]:
        assert not add_special_tokens
        return self.pattern.findall(text)


def write_templates(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    tasks = {
        kind: {"tokens_to_generate": tokens, "template": template, "answer_prefix": prefix}
        for kind, (tokens, template, prefix) in PROMPTS.items()
    }
    (folder / "constants.py").write_text(f"import nothing_that_is_here\n\nTASKS = {tasks!r}")
    (folder / "synthetic.yaml").write_text(json.dumps(SETTINGS))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_templates(tmp_path_factory.mktemp("ruler"))
    for name, corpus in (("squad.json", SQUAD), ("hotpotqa.json", HOTPOTQA)):
        (folder / name).write_text(json.dumps(corpus))
    (folder / "essay.txt").write_text("\n".join(SENTENCES))
    return folder


@pytest.fixture(scope="module")
def tasks(folder):
    return sources.parse_tasks(*((folder / name).read_bytes() for name in sources.OFFICIAL))


@pytest.fixture
def make(folder, tasks):
    """Rows from the made templates, and from the made corpora unless another `data.dir` or none is given."""
    pytest.importorskip("wonderwords", reason="the package wonderwords ([ruler]) is not installed")

    def made(task, length, count=2, reserved=0, data_dir=folder, **options):
        given: Any = {"haystack": str(folder / "essay.txt"), **options}
        settings = DataSettings(data_dir, options=RulerConfig(length, **given))
        return generator.rows(tasks[task], WordTokenizer(), settings, count, reserved)

    return made


@pytest.mark.parametrize("task", TASKS)
def test_row_fits_and_holds_its_answers(task, make, tasks):
    tokenizer, length, reserved = WordTokenizer(), 2500, 17
    for row in make(task, length, seed=7, reserved=reserved):
        prompt = row.official["input"] + row.official["answer_prefix"]
        counted = len(tokenizer.encode(prompt, add_special_tokens=False, verbose=False))
        assert row.official["length"] == counted + tasks[task].max_new_tokens
        assert length * 0.5 < row.official["length_w_model_temp"] == row.official["length"] + reserved <= length
        evidence = [row.context[start:end] for start, end in row.evidence]
        assert evidence
        assert all(any(output in text for text in evidence) for output in row.official["outputs"])
        assert all(any(output in text for output in row.official["outputs"]) for text in evidence)
        assert "{" not in prompt


def test_needles_stand_between_sentences(make, folder):
    row = make("niah_multiquery", 3000, count=1)[0]
    assert len(row.official["outputs"]) == len(set(row.official["outputs"])) == len(row.evidence) == 4
    text = row.official["input"].split("\n")[1]
    for needle in [row.context[start:end] for start, end in row.evidence]:
        assert re.search(rf"(^|ran\. |\d\. ){re.escape(needle)}( The| One|$)", text)
        text = text.replace(needle, "")
    words = text.split()
    assert words == (" ".join(SENTENCES).split() * 9)[: len(words)]  # the text is repeated


def test_folder_of_texts_is_one_text(make, folder, tmp_path):
    half = len(SENTENCES) // 2
    (tmp_path / "in").mkdir()
    (tmp_path / "a.txt").write_text("\n".join(SENTENCES[:half]))
    (tmp_path / "in" / "b.md").write_text("\n".join(SENTENCES[half:]))
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert make("niah_single_2", 3000, haystack=str(tmp_path)) == make("niah_single_2", 3000)


def test_qa_question_has_its_own_documents_first(make):
    row = make("qa_1", 2500, count=3)[2]
    assert row.official["input"].endswith("Question: Who is in 2 of 0?")
    assert row.official["outputs"] == ["2 wolves", "wolves"]
    documents = re.findall(r"Document (\d+):\n(.*)", row.official["input"])
    assert [int(number) for number, _ in documents] == list(range(1, len(documents) + 1))
    texts = [text for _, text in documents]
    assert sum(" of 0:" in text for text in texts) == 15  # all of its article, before any other
    assert len(set(texts)) == len(texts) > 15
    assert [row.context[start:end] for start, end in row.evidence] == [
        text for text in texts if text.startswith("Paragraph 2 of 0")
    ]


def test_qa_documents_repeat_if_they_are_too_few(make):
    row = make("qa_2", 30_000, count=1)[0]
    assert row.official["input"].count("Title 7-4\n") >= 2


def test_hub_rows_give_the_same_rows_as_the_official_files(make, hub_rows):
    squad = hub_rows["rajpurkar/squad_v2", None, "validation"] = []
    for article in SQUAD["data"]:
        for paragraph in article["paragraphs"]:
            shared = {"title": article["title"], "context": paragraph["context"]}
            for asked in paragraph["qas"]:
                answers = {"text": [answer["text"] for answer in asked["answers"]]}
                squad.append(shared | {"question": asked["question"], "answers": answers})
    hotpotqa = hub_rows["hotpotqa/hotpot_qa", "distractor", "validation"] = []
    for row in HOTPOTQA:
        titles, texts = zip(*row["context"], strict=True)
        facts = {"title": [title for title, _ in row["supporting_facts"]], "sent_id": [1, 0]}
        hotpotqa.append(row | {"context": {"title": titles, "sentences": texts}, "supporting_facts": facts})
    for task in ("qa_1", "qa_2"):
        assert make(task, 2500, data_dir=None) == make(task, 2500)


def test_cwe_needs_a_second_list_for_more_words_than_wonderwords(make, tmp_path, monkeypatch):
    monkeypatch.setattr(
        generator, "words", lambda *kinds: [[f"{kind}{number}" for number in range(99)] for kind in kinds]
    )
    with pytest.raises(UserError, match=r"data\.dir=FOLDER with english_words\.json"):
        make("cwe", 40_000)
    (tmp_path / "english_words.json").write_text(json.dumps({str(number): f"w{number}x" for number in range(20_000)}))
    row = make("cwe", 40_000, data_dir=tmp_path)[0]
    assert all(re.fullmatch(r"w\d+x", output) for output in row.official["outputs"])
    (tmp_path / "english_words.json").write_text("{}")
    with pytest.raises(UserError, match=r"cwe needs 4096 different words .*, but english_words\.json has 0"):
        make("cwe", 40_000, data_dir=tmp_path)


def test_pairs_are_all_pairs_sorted():
    adjectives = ["well", "well-made", "a", "ab", "a-b", "well-", "zoo", "a"]
    nouns = ["made-cup", "cup", "ant", "b-cup", "zebra", "made", "cup"]
    pairs = sources.Pairs(adjectives, nouns)
    assert list(pairs) == sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    with pytest.raises(IndexError):
        pairs[len(pairs)]


def test_templates_other_than_the_pinned_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"constants\.py is missing"):
        read_tasks(tmp_path)
    write_templates(tmp_path)
    with pytest.raises(UserError, match=r"constants\.py: differs from RULER's own .*/c3f5e3b"):
        read_tasks(tmp_path)


@NEEDS_SHARED
def test_hash_in_the_rows_is_of_the_official_files():
    content = b"".join((SHARED / "ruler" / "official" / name).read_bytes() for name in sources.OFFICIAL)
    assert hashlib.sha256(content).hexdigest() == sources.OFFICIAL_SHA256


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        *(
            (task, {"length": 140}, rf"ruler\.length=140 is too short for {task}: .* give a larger")
            for task in ("niah_single_1", "vt", "cwe", "fwe", "qa_1")
        ),
        ("vt", {"reserved": 450}, "vt cannot be made with this tokenizer: its worked example .* 500 tokens"),
        ("niah_single_3", {"haystack": None}, r"niah_single_3 hides its needles in a text: give ruler\.haystack="),
        ("niah_single_3", {"haystack": "nowhere"}, "nowhere: cannot be read"),
        ("qa_2", {"count": 31}, "qa_2 has 30 questions, but 31 rows were requested"),
    ],
)
def test_rows_that_cannot_be_made_are_refused(task, options, message, make):
    with pytest.raises(UserError, match=message):
        make(task, **{"length": 4096} | options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("squad.json", "{", "not valid JSON"),
        ("squad.json", '{"data": [{"paragraphs": [{}]}]}', "not in the official format of squad"),
        ("squad.json", '{"data": []}', "holds no question"),
        ("hotpotqa.json", '[{"question": "Why?"}]', "not in the official format of hotpotqa"),
    ],
)
def test_malformed_corpora_are_refused(name, content, message, tmp_path, make, monkeypatch):
    (tmp_path / name).write_text(content)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    with pytest.raises(UserError, match=rf"{name}: {message}"):
        make("qa_1" if name == "squad.json" else "qa_2", 4096, data_dir=Path("~") / tmp_path.name)
