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
from eval.benchmarks import SUITES, downloads, longbench
from eval.benchmarks.datasets import DATASETS, datasets_asked_for, load_rows
from eval.benchmarks.rows import parse_example, read_lines
from eval.benchmarks.suite import DataSettings, Example, LoadedDataset
from lazyllm.errors import UserError
from tests.eval import official
from tests.eval.store.test_folder import JSON
from tests.hub_server import Repository

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


def as_line(row: object) -> str:
    return row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)


def write_rows(folder: Path, *rows: object, name: str = "qasper") -> Path:
    """The file of the rows; config files too."""
    (folder / "config").mkdir(exist_ok=True)
    for config, text in CONFIG.items():
        (folder / "config" / config).write_text(text)
    file = folder / f"{name}.jsonl"
    file.write_bytes("".join(f"{as_line(row)}\n" for row in rows).encode("utf-8", "surrogatepass"))
    return file


def load(folder: Path) -> LoadedDataset:
    return load_rows(QASPER, folder)


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


def test_rows_become_examples(tmp_path):
    row = ROW | {"_id": "two"}
    write_rows(tmp_path, ROW, row)
    loaded = load(tmp_path)
    one = Example("qasper", "one", "\nAsk: Who? ", "A cat\r\nsat.\u2028", ("cat", "a cat"), (), 3, "Read: ")
    assert loaded.examples == (one, replace(one, id="two"))
    assert [example.official for example in loaded.examples] == [ROW, row]
    assert (loaded.max_new_tokens, loaded.dataset) == (9, QASPER)


def test_lines_end_at_newlines_only_and_blank_ones_are_ignored(tmp_path):
    first, second = as_line(ROW), as_line(ROW | {"_id": "two"}).replace(", ", ",\r", 1)
    write_rows(tmp_path).write_bytes(f"\n{first}\r\n  \n{second}".encode())
    assert [example.id for example in load(tmp_path).examples] == ["one", "two"]


def test_rows_without_id_get_one_from_their_content(tmp_path):
    anonymous = {key: value for key, value in ROW.items() if key != "_id"}
    other = anonymous | {"input": "What?"}
    write_rows(tmp_path, anonymous, other)
    ids = [example.id for example in load(tmp_path).examples]
    # The hash ignores the order of rows and fields, and depends on every row.
    write_rows(tmp_path, other, dict(reversed(anonymous.items())))
    assert [example.id for example in load(tmp_path).examples] == ids[::-1]
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
def test_incomplete_folder_is_refused_with_its_content(tmp_path, missing):
    write_rows(tmp_path, ROW)
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=rf"data\.dir={tmp_path}: {missing} is missing; give data\.dir=FOLDER"):
        load(tmp_path)


def test_other_templates_are_told_once(tmp_path, caplog):
    write_rows(tmp_path, ROW)
    assert load(tmp_path) == load(tmp_path)
    told = [line.partition(": differs from LongBench's own")[0] for line in caplog.messages]
    assert told == [f"{tmp_path}/config/{name}" for name in (longbench.PROMPTS, longbench.MAX_LENGTHS)]


UNFILLED = r"qasper\.jsonl:1: the template cannot be filled .* literal braces"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (longbench.PROMPTS, [], "JSON object"),
        (longbench.PROMPTS, {"lcc": ""}, "qasper"),
        *((longbench.PROMPTS, {"qasper": text}, "qasper") for text in ("", "{context}{context}")),
        *((longbench.MAX_LENGTHS, {"qasper": number}, "at least 1") for number in (0, True)),
        *(
            (longbench.PROMPTS, {"qasper": "{context}" + text}, UNFILLED)
            for text in ("{question}", "{}", "{input.x}", "{all_classes[0]}", "{", "}")
        ),
    ],
)
def test_bad_config_file_is_refused(tmp_path, name, content, reason):
    write_rows(tmp_path, ROW)
    (tmp_path / "config" / name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=reason if reason == UNFILLED else rf"{name}: .*{reason}"):
        load(tmp_path)
    (tmp_path / "config" / name).write_text("{")
    with pytest.raises(UserError, match=rf"{name}: not valid JSON"):
        load(tmp_path)


def test_names_mean_datasets_each_once_in_order_and_unknown_ones_are_refused():
    for names, expected in {
        ("lcc", "code", "qasper"): ["lcc", "repobench-p", "qasper"],
        ("qasper", "lcc"): ["qasper", "lcc"],
        ("few_shot",): ["trec", "triviaqa", "samsum"],
    }.items():
        assert [dataset.name for dataset in datasets_asked_for(dict.fromkeys(names, True), "llama2")] == expected
    for name, reason in (("hotpot", "nearest names are hotpotqa"), ("xxxxxxxx", "lazyllm-bench run --list shows all")):
        with pytest.raises(UserError, match=reason):
            datasets_asked_for({name: True}, "llama2")


REPOSITORY = "THUDM/LongBench"


@pytest.fixture
def server(hub, monkeypatch):
    """LongBench as the hub and GitHub serve it, with rows of our own."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as opened:
        opened.writestr("data/qasper.jsonl", as_line(ROW))
    archive = Repository({"data.zip": packed.getvalue()}, "datasets", commit=longbench.HUB_REVISION)
    hub.repositories[REPOSITORY] = archive
    hub.others |= {f"/config/{name}": text.encode() for name, text in CONFIG.items()}
    monkeypatch.setattr(longbench, "HUB_SHA256", hashlib.sha256(packed.getvalue()).hexdigest())
    monkeypatch.setattr(longbench, "CONFIG_URL", f"{hub.url}/config/")
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in CONFIG.items()}
    monkeypatch.setattr(longbench, "CONFIG_SHA256", hashes)
    return hub


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
    with pytest.raises(UserError, match=r"no network is used.*data\.dir=FOLDER"):
        load_rows(QASPER)


MINI = official.SHARED / "minilongbench"


def mini_rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_bytes().split(b"\n") if line.strip()]


def in_mini(name: str, folder: Path | None) -> LoadedDataset:
    return SUITES["longbench"].load(DATASETS[name], DataSettings(folder, subset="mini"))


@official.needs(MINI)
@pytest.mark.parametrize("name", LONGBENCH_NAMES)
def test_mini_is_minilongbench_wherever_its_rows_are(name, tmp_path):
    rows, whole = mini_rows(MINI, name), load_rows(DATASETS[name], MINI)
    loaded = in_mini(name, MINI)
    assert loaded.examples == whole.examples
    assert [example.official for example in loaded.examples] == rows
    assert loaded.total == longbench.PUBLISHED[name].examples
    # among other rows of LongBench, in another order, with other ids
    others = [row | {"input": f"{row['input']} "} for row in rows]
    copies = [row | {"_id": f"{number}", "length": 9} for number, row in enumerate([*rows[::-1], *others])]
    (tmp_path / "config").symlink_to(MINI / "config")
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in copies))
    found = in_mini(name, tmp_path).examples
    assert [example.id for example in found] == [f"{number}" for number in range(len(rows))][::-1]
    assert [(one.context, one.input, one.answers) for one in found] == [
        (one.context, one.input, one.answers) for one in whole.examples
    ]


@official.needs(MINI)
def test_mini_has_187_rows_and_their_number_is_planned():
    sizes = longbench.published(DataSettings(subset="mini"))
    counted = {name: len(mini_rows(MINI, name)) for name in LONGBENCH_NAMES}
    assert {name: size.examples for name, size in sizes.items()} == counted
    assert sum(counted.values()) == 187
    for name, size in sizes.items():
        assert size.words == round(sum(row["length"] for row in mini_rows(MINI, name)) / counted[name])


@official.needs(MINI)
def test_missing_rows_of_mini_are_counted_in_one_line():
    lacking = {name: len(mini_rows(MINI, name)) - len(official.shared_rows()[name]) for name in LONGBENCH_NAMES}
    assert any(lacking.values())
    for name, count in lacking.items():
        if count:
            rows = len(mini_rows(MINI, name))
            with pytest.raises(UserError, match=rf"{name}\.jsonl: {count} of the {rows} rows of {name}[^\n]*missing"):
                in_mini(name, official.LONGBENCH)


@official.needs(MINI)
def test_mini_is_fetched_from_its_own_repository_unless_longbench_is_here(server):
    content = (MINI / "qasper.jsonl").read_bytes()
    server.repositories["linggm/MiniLongBench"] = Repository({"data/qasper.jsonl": content}, "datasets")
    assert [example.official for example in in_mini("qasper", None).examples] == mini_rows(MINI, "qasper")
    assert not [path for _, path in server.asked if "THUDM" in path]
    _ = load_rows(QASPER)  # whose archive has other rows
    with pytest.raises(UserError, match=r"data\.zip:data/qasper\.jsonl: 9 of the 9 rows"):
        in_mini("qasper", None)


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


def test_longbench_e_groups_rows_by_length_and_the_rows_command_writes_them_to_be_read_again(tmp_path):
    groups = {0: "0-4k", 3999: "0-4k", 4000: "4-8k", 7999: "4-8k", 8000: "8k+", 70_000: "8k+"}
    rows = [ROW | {"length": length, "_id": f"{length}", "dataset": "qasper_e"} for length in groups]
    write_rows(tmp_path, ROW, *rows, name="qasper_e")
    loaded, out = load_rows(DATASETS["qasper_e"], tmp_path), tmp_path / "out"
    assert [example.groups[0] for example in loaded.examples[1:]] == [f"length={group}" for group in groups.values()]
    assert (loaded.examples[0].instruction, loaded.max_new_tokens) == ("Read: ", 9)
    assert cli.main(["rows", "dataset=qasper_e", f"data.dir={tmp_path}", f"out={out}"]) == 0
    assert [json.loads(line) for line in (out / "qasper_e.jsonl").read_text().splitlines()] == [ROW, *rows]
    (out / "config").symlink_to(tmp_path / "config")
    assert load_rows(DATASETS["qasper_e"], out).examples == loaded.examples
