"""Rows and templates: real ones, malformed ones, and fetching, against a server on the loopback."""

import hashlib
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eval import cli
from eval.analysis.registry import TABLES
from eval.benchmarks import downloads, longbench
from eval.benchmarks.datasets import DATASETS, datasets_asked_for, load_rows
from eval.benchmarks.metrics import dataset_score
from eval.benchmarks.rows import parse_example, read_lines
from eval.benchmarks.suite import Example, LoadedDataset, OnError, Turn
from eval.store.results import Results
from lazyllm.errors import UserError
from tests.eval import official
from tests.eval.analysis import made
from tests.eval.store.test_folder import JSON
from tests.hub_server import HubServer, Repository

LONGBENCH_NAMES = [name for name, dataset in DATASETS.items() if dataset.suite == "longbench"]
QASPER = DATASETS["qasper"]
CONFIG = {
    longbench.PROMPTS: json.dumps({"qasper": "Read: {context}\nAsk: {input} "}),
    longbench.MAX_LENGTHS: '{"qasper": 9}',
}
ROW = {
    "input": "Who?",
    "context": "A cat\r\nsat.\u2028",
    "answers": ["cat", "a cat"],
    "length": 3,
    "dataset": "qasper",
    "language": "en",
    "all_classes": None,
    "_id": "one",
}
TURN = {"input": "Why?", "answers": ["a whim"]}


def as_line(row: object) -> str:
    return row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)


@pytest.fixture
def folder(tmp_path):
    """A data folder with config files."""
    write_rows(tmp_path)
    (tmp_path / "qasper.jsonl").unlink()
    return tmp_path


def write_rows(folder: Path, *rows: object, name: str = "qasper") -> Path:
    """The file of the rows; config files too, unless they are there."""
    (folder / "config").mkdir(exist_ok=True)
    for config, text in CONFIG.items():
        if not (folder / "config" / config).exists():
            (folder / "config" / config).write_text(text)
    file = folder / f"{name}.jsonl"
    file.write_bytes("".join(f"{as_line(row)}\n" for row in rows).encode("utf-8", "surrogatepass"))
    return file


def load(folder: Path, on_error: OnError = "raise") -> LoadedDataset:
    return load_rows(QASPER, folder, on_error)


@official.needs(official.LONGBENCH)
@pytest.mark.parametrize("name", LONGBENCH_NAMES)
def test_real_rows_are_loaded_unchanged(name, caplog):
    loaded = load_rows(DATASETS[name], official.LONGBENCH)
    assert caplog.messages == []  # the templates there are LongBench's own
    files = (official.LONGBENCH / "config" / file for file in (longbench.PROMPTS, longbench.MAX_LENGTHS))
    template, max_new_tokens = (json.loads(file.read_bytes())[name] for file in files)
    assert [
        (row.id, row.instruction + row.context + row.input, row.context, [*row.answers]) for row in loaded.examples
    ] == [(row["_id"], template.format(**row), row["context"], row["answers"]) for row in official.shared_rows()[name]]
    assert (loaded.skipped, loaded.max_new_tokens) == ((), max_new_tokens)
    file = official.LONGBENCH / f"{name}.jsonl"
    assert loaded.data_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_row_becomes_an_example(folder):
    write_rows(folder, ROW)
    loaded = load(folder)
    assert loaded.examples == (
        Example("qasper", "one", "\nAsk: Who? ", "A cat\r\nsat.\u2028", ("cat", "a cat"), (), 3, "Read: "),
    )
    assert loaded.max_new_tokens == 9
    assert loaded.dataset is QASPER


def test_row_with_later_turns_becomes_an_example_and_a_row_again(folder):
    row = ROW | {"turns": [TURN, TURN | {"input": "Where?", "answer_prefix": "On"}]}
    write_rows(folder, row)
    [example] = load(folder).examples
    assert example.turns == (Turn("Why?", ("a whim",)), Turn("Where?", ("a whim",), "On"))
    assert example.official == row


def test_lines_end_at_newlines_only_and_blank_ones_are_ignored(folder):
    first, second = as_line(ROW), as_line(ROW | {"_id": "two"}).replace(", ", ",\r", 1)
    (folder / "qasper.jsonl").write_bytes(f"\n{first}\r\n  \n{second}".encode())
    assert [example.id for example in load(folder).examples] == ["one", "two"]


def test_rows_without_id_get_one_from_their_content(folder):
    anonymous = {key: value for key, value in ROW.items() if key != "_id"}
    other = anonymous | {"input": "What?"}
    write_rows(folder, anonymous, other)
    ids = [example.id for example in load(folder).examples]
    # The hash ignores the order of rows and fields, and depends on every row.
    write_rows(folder, other, dict(reversed(anonymous.items())))
    assert [example.id for example in load(folder).examples] == ids[::-1]
    assert len(set(ids)) == 2


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=300) | st.lists(JSON.map(json.dumps)).map(lambda lines: "\n".join(lines).encode()))
@example(b"\xff\xfe{\x00}\x00\n")
@example(b'{"a":' * 2000)
def test_arbitrary_lines_are_refused_one_by_one(content: bytes) -> None:
    for where, row in read_lines(content, "file"):
        assert content.split(b"\n")[int(where.removeprefix("file:")) - 1].strip()
        with pytest.raises(UserError):
            parse_example(QASPER, "{context}", row)


@pytest.mark.parametrize("missing", ["qasper.jsonl", f"config/{longbench.PROMPTS}", f"config/{longbench.MAX_LENGTHS}"])
def test_incomplete_folder_is_refused_with_its_content(folder, missing):
    write_rows(folder, ROW)
    (folder / missing).unlink()
    with pytest.raises(UserError, match=rf"data\.dir={folder}: {missing} is missing; give data\.dir=FOLDER"):
        load(folder)


def test_other_templates_are_told_once(folder, caplog):
    write_rows(folder, ROW)
    assert load(folder) == load(folder)
    told = [line.partition(": differs from LongBench's own")[0] for line in caplog.messages]
    assert told == [f"{folder}/config/{name}" for name in (longbench.PROMPTS, longbench.MAX_LENGTHS)]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (longbench.PROMPTS, "{", "JSON"),
        (longbench.PROMPTS, "[]", "JSON object"),
        (longbench.PROMPTS, '{"lcc": ""}', "qasper"),
        *((longbench.PROMPTS, json.dumps({"qasper": text}), "qasper") for text in ("", "{context}{context}")),
        (longbench.MAX_LENGTHS, '{"qasper": 0}', "at least 1"),
        (longbench.MAX_LENGTHS, '{"qasper": true}', "at least 1"),
    ],
)
def test_bad_config_file_is_refused(folder, name, text, reason):
    write_rows(folder, ROW)
    (folder / "config" / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}.*{reason}"):
        load(folder)


@pytest.mark.parametrize("text", ["{question}", "{}", "{input.x}", "{all_classes[0]}", "{", "}"])
def test_template_that_a_row_cannot_fill_is_refused(folder, text):
    write_rows(folder, ROW)
    (folder / "config" / longbench.PROMPTS).write_text(json.dumps({"qasper": "{context}" + text}))
    with pytest.raises(UserError, match=r"qasper\.jsonl:1: the template cannot be filled .* literal braces"):
        load(folder)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["lcc", "code", "qasper"], ["lcc", "repobench-p", "qasper"]),
        (["qasper", "lcc"], ["qasper", "lcc"]),
        (["few_shot"], ["trec", "triviaqa", "samsum"]),
    ],
)
def test_names_mean_datasets_each_once_in_order(names, expected):
    assert [dataset.name for dataset in datasets_asked_for(dict.fromkeys(names, True), "llama2")] == expected


@pytest.mark.parametrize(
    ("name", "reason"), [("hotpot", "did you mean hotpotqa"), ("xxxxxxxx", "expected one of all, ")]
)
def test_unknown_names_are_refused(name, reason):
    with pytest.raises(UserError, match=reason):
        datasets_asked_for({name: True}, "llama2")


REPOSITORY = "THUDM/LongBench"


@pytest.fixture
def server(tmp_path, monkeypatch):
    """LongBench as the hub and GitHub serve it, with rows of our own, and an empty cache."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as opened:
        opened.writestr("data/qasper.jsonl", as_line(ROW))
    archive = Repository({"data.zip": packed.getvalue()}, "datasets", commit=longbench.HUB_REVISION)
    served = HubServer({REPOSITORY: archive}, {f"/config/{name}": text.encode() for name, text in CONFIG.items()})
    monkeypatch.setenv("LAZYLLM_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
    template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(longbench, "HUB_SHA256", hashlib.sha256(packed.getvalue()).hexdigest())
    monkeypatch.setattr(longbench, "CONFIG_URL", f"{served.url}/config/")
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in CONFIG.items()}
    monkeypatch.setattr(longbench, "CONFIG_SHA256", hashes)
    yield served
    served.close()


def test_rows_and_templates_are_fetched_once_then_read_offline(server, monkeypatch):
    loaded = load_rows(QASPER)
    assert [example.id for example in loaded.examples] == ["one"]
    assert loaded.examples[0].instruction == "Read: "
    assert loaded.data_sha256 == hashlib.sha256(as_line(ROW).encode()).hexdigest()
    assert loaded.source.endswith("data.zip:data/qasper.jsonl")
    files = [f"/datasets/{REPOSITORY}/resolve/{longbench.HUB_REVISION}/data.zip", *server.others]
    assert [server.asked.count(("GET", path)) for path in files] == [1, 1, 1]
    server.asked.clear()
    monkeypatch.setattr(downloads, "is_reachable", lambda *_: pytest.fail("the network was asked for"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_rows(QASPER) == loaded
    assert not server.asked


@pytest.mark.parametrize("path", ["data.zip", f"/config/{longbench.PROMPTS}"])
@pytest.mark.parametrize(
    ("content", "reason"), [(b"else", "not LongBench's"), (None, r"downloaded .*data\.dir=FOLDER.* with a network")]
)
def test_downloads_other_than_the_pinned_files_are_refused(server, tmp_path, path, content, reason):
    files = next(files for files in (server.repositories[REPOSITORY].files, server.others) if path in files)
    files.pop(path)
    if content is not None:
        files[path] = content
    with pytest.raises(UserError, match=rf"{path}[^\n]*{reason}"):
        load_rows(QASPER)
    assert not (tmp_path / "cache" / "longbench" / "config" / longbench.PROMPTS).exists()


def test_missing_files_are_refused_offline_with_two_ways_out(server, tmp_path, monkeypatch):
    server.close()
    with pytest.raises(UserError, match=rf"{server.url} does not answer.*data\.dir=FOLDER[^\n]*$"):
        load_rows(QASPER)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE is set.*data\.dir=FOLDER"):
        load_rows(QASPER)


# LongBench's README: LongBench-E has these 13
E_NAMES = """
    qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum passage_count
    passage_retrieval_en lcc repobench-p
""".split()  # noqa: SIM905


def test_longbench_e_differs_from_longbench_in_rows_only():
    assert [f"{name}_e" for name in E_NAMES] == [dataset.name for dataset in longbench.SUITE_E.datasets]
    for name in E_NAMES:
        same = replace(DATASETS[f"{name}_e"], name=name, suite="longbench", prompt_of="")
        assert same == DATASETS[name]


def test_longbench_e_groups_rows_by_length(folder):
    lengths = [0, 3999, 4000, 7999, 8000, 70_000]
    write_rows(folder, *(ROW | {"length": length, "_id": f"{length}"} for length in lengths), name="qasper_e")
    loaded = load_rows(DATASETS["qasper_e"], folder)
    assert [example.groups for example in loaded.examples] == [
        ("length=0-4k",), ("length=0-4k",), ("length=4-8k",), ("length=4-8k",), ("length=8k+",), ("length=8k+",)
    ]  # fmt: skip
    assert (loaded.examples[0].instruction, loaded.max_new_tokens) == ("Read: ", 9)
    write_rows(folder, ROW | {"dataset": "qasper_e"}, name="qasper_e")
    assert len(load_rows(DATASETS["qasper_e"], folder).examples) == 1


def test_rows_command_writes_rows_that_can_be_read_again(folder, tmp_path):
    write_rows(folder, ROW, ROW | {"_id": "two", "length": 5000}, name="qasper_e")
    out = tmp_path / "out"
    assert cli.main(["rows", "dataset=qasper_e", f"data.dir={folder}", f"out={out}"]) == 0
    assert [json.loads(line)["length"] for line in (out / "qasper_e.jsonl").read_text().splitlines()] == [3, 5000]
    (out / "config").symlink_to(folder / "config")
    assert load_rows(DATASETS["qasper_e"], out).examples == load_rows(DATASETS["qasper_e"], folder).examples


def test_longbench_e_scores_by_length_are_official():
    """As `scorer_e` of `eval.py`, but for NumPy's mean: by dataset and length, the mean times 100, in 2 digits."""
    scores = {"0-4k": [0.5, 0.25, 1 / 3], "4-8k": [1.0], "8k+": [0.0, 0.125]}
    visits = [
        replace(made.example("qasper_e", f"{group}-{number}", score=score), groups=[f"length={group}"])
        for group, of_group in scores.items()
        for number, score in enumerate(of_group)
    ]
    frame = TABLES["groups"](Results([made.stored(visits)])).frame
    rows = frame[(frame["method"] == "lazy") & (frame["level"] == "dataset")]
    expected = {f"length={group}": round(100 * sum(of_group) / len(of_group), 2) for group, of_group in scores.items()}
    everything = [score for of_group in scores.values() for score in of_group]
    assert dict(zip(rows["group"], rows["score"], strict=True)) == expected | {"all": dataset_score(everything)}
    assert list(rows["group"]) == ["all", "length=0-4k", "length=4-8k", "length=8k+"]
    assert list(rows["examples"]) == [6, 3, 1, 2]
