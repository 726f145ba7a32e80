"""LongBench: real and malformed rows, templates, downloads, the mini subset, LongBench-E."""

import hashlib
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eval.benchmarks import longbench
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.rows import parse_example, read_lines
from eval.benchmarks.suite import DataSettings, Example
from lazyllm.errors import UserError
from tests.eval import official
from tests.eval.benchmarks.loading import LONGBENCH, load
from tests.eval.store.test_folder import JSON
from tests.hub_server import HubServer, Repository

PROMPTS, MAX_LENGTHS = longbench.PROMPTS, longbench.MAX_LENGTHS
CONFIG = {
    PROMPTS: json.dumps({"qasper": "Read: {context}\nAsk: {input} "}),
    MAX_LENGTHS: '{"qasper": 9}',
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


def write(folder: Path, *rows: object, name: str = "qasper") -> Path:
    """The file of the rows; config files too."""
    (folder / "config").mkdir(exist_ok=True)
    for config, text in CONFIG.items():
        (folder / "config" / config).write_text(text)
    file = folder / f"{name}.jsonl"
    file.write_bytes("".join(f"{as_line(row)}\n" for row in rows).encode("utf-8", "surrogatepass"))
    return file


@official.needs(official.LONGBENCH)
@pytest.mark.parametrize("name", LONGBENCH)
def test_real_rows_are_loaded_unchanged(name: str, caplog: Any) -> None:
    loaded = load(name, official.LONGBENCH)
    assert caplog.messages == []  # the templates there are LongBench's own
    configs = [official.LONGBENCH / "config" / file for file in CONFIG]
    template, max_new_tokens = (json.loads(file.read_bytes())[name] for file in configs)
    found = [
        (row.id, row.instruction + row.context + row.input, row.context, [*row.answers])
        for row in loaded.examples
    ]
    assert found == [
        (row["_id"], template.format(**row), row["context"], row["answers"])
        for row in official.shared_rows()[name]
    ]
    assert (loaded.skipped, loaded.max_new_tokens) == ((), max_new_tokens)
    content = (official.LONGBENCH / f"{name}.jsonl").read_bytes()
    assert loaded.data_sha256 == hashlib.sha256(content).hexdigest()


def test_rows_become_examples_and_lines_end_at_newlines_only(tmp_path: Path) -> None:
    second = ROW | {"_id": "two"}
    spaced = as_line(second).replace(", ", ",\r", 1)
    write(tmp_path).write_bytes(f"\n{as_line(ROW)}\r\n  \n{spaced}".encode())
    loaded = load("qasper", tmp_path)
    expected = Example("qasper", "one", "\nAsk: Who? ", "A cat\r\nsat.\u2028", ("cat", "a cat"))
    expected = replace(expected, length=3, instruction="Read: ")
    assert loaded.examples == (expected, replace(expected, id="two"))
    assert [row.official for row in loaded.examples] == [ROW, second]
    assert (loaded.max_new_tokens, loaded.dataset) == (9, DATASETS["qasper"])


def test_rows_without_id_get_one_from_their_content(tmp_path: Path) -> None:
    anonymous = {key: value for key, value in ROW.items() if key != "_id"}
    other = anonymous | {"input": "What?"}
    write(tmp_path, anonymous, other)
    ids = [row.id for row in load("qasper", tmp_path).examples]
    # the hash ignores the order of rows and fields, and depends on every row
    write(tmp_path, other, dict(reversed(anonymous.items())))
    assert [row.id for row in load("qasper", tmp_path).examples] == ids[::-1]
    assert len({*ids}) == 2


@given(
    st.binary(max_size=300) | st.lists(JSON.map(json.dumps)).map(lambda x: "\n".join(x).encode())
)
@example(b"\xff\xfe{\x00}\x00\n")
@example(b'{"a":' * 2000)
def test_arbitrary_lines_are_refused_one_by_one(content: bytes) -> None:
    for where, row in read_lines(content, "file"):
        assert content.split(b"\n")[int(where.removeprefix("file:")) - 1].strip()
        with pytest.raises(UserError):
            parse_example(DATASETS["qasper"], "{context}", row)


def test_other_templates_are_told_once(tmp_path: Path, caplog: Any) -> None:
    write(tmp_path, ROW)
    assert load("qasper", tmp_path) == load("qasper", tmp_path)
    named = [line.partition(": differs from LongBench's own")[0] for line in caplog.messages]
    assert named == [f"{tmp_path}/config/{name}" for name in CONFIG]


@pytest.mark.parametrize("name", ["qasper.jsonl", *(f"config/{name}" for name in CONFIG)])
def test_incomplete_folder_is_refused_with_its_content(tmp_path: Path, name: str) -> None:
    write(tmp_path, ROW)
    (tmp_path / name).unlink()
    expected = rf"data\.dir={tmp_path}: {name} is missing; give data\.dir=FOLDER with LongBench's"
    with pytest.raises(UserError, match=expected):
        load("qasper", tmp_path)


UNFILLED = r"qasper\.jsonl:1: the template cannot be filled .* literal braces"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (PROMPTS, "{", f"{PROMPTS}: not valid JSON"),
        (PROMPTS, "[]", f"{PROMPTS}: expected a JSON object"),
        (PROMPTS, '{"lcc": ""}', f"{PROMPTS}: field 'qasper' is missing"),
        (PROMPTS, '{"qasper": ""}', f"{PROMPTS}: .* a prompt with {{context}}, once"),
        (PROMPTS, '{"qasper": "{context}{context}"}', f"{PROMPTS}: .* once"),
        (MAX_LENGTHS, '{"qasper": 0}', f"{MAX_LENGTHS}: .* at least 1"),
        (MAX_LENGTHS, '{"qasper": true}', f"{MAX_LENGTHS}: .* at least 1"),
        *(
            (PROMPTS, json.dumps({"qasper": "{context}" + text}), UNFILLED)
            for text in ("{question}", "{}", "{input.x}", "{all_classes[0]}", "{", "}")
        ),
    ],
)
def test_bad_config_file_is_refused(tmp_path: Path, name: str, content: str, reason: str) -> None:
    write(tmp_path, ROW)
    (tmp_path / "config" / name).write_text(content)
    with pytest.raises(UserError, match=reason):
        load("qasper", tmp_path)


REPOSITORY = "THUDM/LongBench"


@pytest.fixture
def server(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """LongBench as the hub and GitHub serve it, with rows of our own."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as opened:
        opened.writestr("data/qasper.jsonl", as_line(ROW))
    content = packed.getvalue()
    archive = Repository({"data.zip": content}, "datasets", commit=longbench.HUB_REVISION)
    hub.repositories[REPOSITORY] = archive
    hub.others |= {f"/config/{name}": text.encode() for name, text in CONFIG.items()}
    monkeypatch.setattr(longbench, "HUB_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(longbench, "CONFIG_URL", f"{hub.url}/config/")
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in CONFIG.items()}
    monkeypatch.setattr(longbench, "CONFIG_SHA256", hashes)
    return hub


def test_files_are_fetched_once_then_read_without_a_request(server: HubServer) -> None:
    assert not longbench.is_cached(DataSettings())
    loaded = load("qasper")
    assert [(row.id, row.instruction) for row in loaded.examples] == [("one", "Read: ")]
    assert loaded.data_sha256 == hashlib.sha256(as_line(ROW).encode()).hexdigest()
    assert loaded.source.endswith("data.zip:data/qasper.jsonl")
    archive = f"/datasets/{REPOSITORY}/resolve/{longbench.HUB_REVISION}/data.zip"
    assert [server.requests.count(("GET", path)) for path in (archive, *server.others)] == [1, 1, 1]
    server.requests.clear()
    assert load("qasper") == loaded
    assert longbench.is_cached(DataSettings())
    assert not server.requests


def test_an_archive_other_than_the_pinned_one_is_refused(server: HubServer) -> None:
    files: Any = server.repositories[REPOSITORY].files
    files["data.zip"] = b"else"
    with pytest.raises(UserError, match=r"data\.zip: not LongBench's own .*: delete it"):
        load("qasper")


MINI = official.SHARED / "minilongbench"


def mini_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / f"{name}.jsonl").read_bytes().split(b"\n")
    return [json.loads(line) for line in lines if line.strip()]


@official.needs(MINI)
@pytest.mark.parametrize("name", LONGBENCH)
def test_mini_is_minilongbench_wherever_its_rows_are(name: str, tmp_path: Path) -> None:
    rows, whole = mini_rows(MINI, name), load(name, MINI)
    loaded = load(name, MINI, subset="mini")
    assert loaded.examples == whole.examples
    assert [row.official for row in loaded.examples] == rows
    assert loaded.total == longbench.PUBLISHED[name].examples
    # among other rows of LongBench, in another order, with other ids
    others = [row | {"input": f"{row['input']} "} for row in rows]
    mixed = enumerate([*rows[::-1], *others])
    copies = [row | {"_id": f"{number}", "length": 9} for number, row in mixed]
    (tmp_path / "config").symlink_to(MINI / "config")
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in copies))
    found = load(name, tmp_path, subset="mini").examples
    assert [row.id for row in found] == [f"{number}" for number in range(len(rows))][::-1]
    contents = [
        [(row.context, row.input, row.answers) for row in each] for each in (found, whole.examples)
    ]
    assert contents[0] == contents[1]


@official.needs(MINI)
def test_mini_has_187_rows_and_their_number_is_planned() -> None:
    sizes = longbench.published(DataSettings(subset="mini"))
    counted = {name: len(mini_rows(MINI, name)) for name in LONGBENCH}
    assert {name: size.examples for name, size in sizes.items()} == counted
    assert sum(counted.values()) == 187
    for name, size in sizes.items():
        words = [row["length"] for row in mini_rows(MINI, name)]
        assert size.words == round(sum(words) / counted[name])


@official.needs(MINI)
def test_missing_rows_of_mini_are_counted_in_one_line() -> None:
    for name in LONGBENCH:
        rows = len(mini_rows(MINI, name))
        if lacks := rows - len(official.shared_rows()[name]):
            reason = rf"{name}\.jsonl: {lacks} of the {rows} rows of {name}[^\n]*missing"
            with pytest.raises(UserError, match=reason):
                load(name, official.LONGBENCH, subset="mini")


@official.needs(MINI)
def test_mini_is_fetched_from_its_own_repository_unless_longbench_is_here(
    server: HubServer,
) -> None:
    content = (MINI / "qasper.jsonl").read_bytes()
    mini = Repository({"data/qasper.jsonl": content}, "datasets")
    server.repositories["linggm/MiniLongBench"] = mini
    found = load("qasper", subset="mini").examples
    assert [row.official for row in found] == mini_rows(MINI, "qasper")
    assert not [path for _, path in server.requests if "THUDM" in path]
    load("qasper")  # whose archive has other rows
    with pytest.raises(UserError, match=r"data\.zip:data/qasper\.jsonl: 9 of the 9 rows"):
        load("qasper", subset="mini")


# LongBench's README: LongBench-E has these 13
E_NAMES = """
    qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum
    passage_count passage_retrieval_en lcc repobench-p
""".split()  # noqa: SIM905


def test_longbench_e_differs_from_longbench_in_rows_only() -> None:
    assert [f"{name}_e" for name in E_NAMES] == [each.name for each in longbench.SUITE_E.datasets]
    for name in E_NAMES:
        same = replace(DATASETS[f"{name}_e"], name=name, suite="longbench")
        assert same == DATASETS[name]


def test_longbench_e_groups_rows_by_length(tmp_path: Path) -> None:
    groups = {0: "0-4k", 3999: "0-4k", 4000: "4-8k", 7999: "4-8k", 8000: "8k+", 70_000: "8k+"}
    rows = [ROW | {"length": words, "_id": f"{words}", "dataset": "qasper_e"} for words in groups]
    write(tmp_path, ROW, *rows, name="qasper_e")
    loaded = load("qasper_e", tmp_path)
    found = [row.groups for row in loaded.examples[1:]]
    assert found == [(f"length={group}",) for group in groups.values()]
    assert (loaded.examples[0].instruction, loaded.max_new_tokens) == ("Read: ", 9)
    assert [row.official for row in loaded.examples] == [ROW, *rows]
