"""A run's folder on a real disk: identity, locks, full disks, damage."""

from __future__ import annotations

import json
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eval.run.status import status
from eval.store.folder import fingerprint, open_store, read_failures, read_records
from eval.store.record import Failure, Record
from lazyllm.errors import UserError
from tests.eval.store.made import record

IDENTITY = {"model": "tiny", "method": {"name": "lazy", "schedule": {"2": 0.7}}, "seed": 0}
FAILURE = Failure("hotpotqa", "row-9", "no memory", "...")
BEGIN = {"event": "begin", "time": "2026-11-21T10:00:00Z"}


def opened(folder: Path, identity: dict[str, Any] = IDENTITY, part: str = "") -> None:
    with open_store(folder, identity, {}, part):
        pass


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".lock")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three records, a failure and a job."""
    with open_store(tmp_path, IDENTITY, {}) as store:
        for number in range(3):
            store.append(record(number))
        store.fail(FAILURE)
        store.note(BEGIN)
    return tmp_path


def other_schema(folder: Path) -> None:
    (folder / "run.json").write_text(json.dumps({"schema": 99, "identity": IDENTITY}))


def shard_that_disagrees(folder: Path) -> None:
    (folder / "records-2-of-2.jsonl").write_text(record(0, text="another").to_json() + "\n")


def no_description(folder: Path) -> None:
    (folder / "run.json").unlink()


def directory_for(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return make


def description(content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "run.json").write_text(content) and None


@pytest.mark.parametrize(
    ("change", "part", "parts_of_message"),
    [
        (other_schema, "", ["run.json", "99", "out="]),
        (no_description, "", ["run.json", "out="]),
        (shard_that_disagrees, "-1-of-2", ["records-2-of-2.jsonl:1", "row-0", "records.jsonl:1", "without shard="]),
        (directory_for("records.jsonl"), "", ["records.jsonl", "out="]),
        (directory_for("run.json"), "", ["run.json", "out="]),
        *(
            (description(text), "", ["run.json", "Nothing was changed", "out="])
            for text in ("{", "null", '{"schema": 2, "identity": []}', '{"identity": {}}')
        ),
    ],
)
def test_store_refuses_other_folders_without_a_change(
    folder: Path, change: Callable[[Path], None], part: str, parts_of_message: list[str]
) -> None:
    change(folder)
    files = {path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".lock")}
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(UserError) as error:
        opened(folder, part=part)
    assert [text for text in parts_of_message if text not in str(error.value)] == []
    assert {path: path.read_bytes() for path in files} == before


@pytest.mark.parametrize(
    ("part", "change"), [("", {"method": {"name": "lazy", "schedule": {"2": 0.5}}}), ("-2-of-2", {"device": "another"})]
)
def test_store_refuses_another_identity_and_names_the_difference(folder: Path, part: str, change: dict) -> None:
    with pytest.raises(UserError, match=f"differs \\({next(iter(change))}: .*out=FOLDER"):
        opened(folder, IDENTITY | change, part)
    assert fingerprint(IDENTITY | change) != fingerprint(IDENTITY)


@pytest.mark.parametrize(("first", "second"), [("", ""), ("-1-of-2", "-1-of-2"), ("-1-of-2", ""), ("", "-1-of-2")])
def test_store_refuses_a_second_job_of_the_same_examples(tmp_path: Path, first: str, second: str) -> None:
    with open_store(tmp_path, IDENTITY, {}, first) as store:
        with pytest.raises(UserError, match=r"another process is working in this run folder \(preparing\)"):
            opened(tmp_path, part=second)
        store.note({"event": "begin", "time": "2026-01-02T03:04:05Z", "host": "node7", "process": 42, "load": {}})
        with pytest.raises(UserError, match=r"\(process 42 on node7 since 2026-01-02T03:04:05Z\)"):
            opened(tmp_path, part=second)
    opened(tmp_path)  # released


def test_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("eval.store.folder.FileLock.acquire", no_locks)
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
    assert "cannot be locked" in caplog.text


def test_resuming_sets_damaged_lines_aside(folder: Path, caplog) -> None:
    lines = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    garbled = lines[1][:50] + b"\n"
    (folder / "records.jsonl").write_bytes(lines[0] + garbled + lines[2] + b'{"half')
    (folder / "failures.jsonl").write_bytes(b"\xff\n" + (folder / "failures.jsonl").read_bytes())
    with pytest.raises(UserError, match=r"records\.jsonl:2: not a line of records.*run the run's command again"):
        read_records(folder)
    with open_store(folder, IDENTITY, {}) as store:
        assert [record.id for record in store.records.values()] == ["row-0", "row-2"]
        store.append(record(1))  # the lost one, measured again
    assert (folder / "records.jsonl").read_bytes() == lines[0] + lines[2] + lines[1]
    assert (folder / "records.jsonl.damaged-1").read_bytes() == garbled
    assert (folder / "failures.jsonl.damaged-1").read_bytes() == b"\xff\n"
    assert read_failures(folder) == [FAILURE]
    said = [message.getMessage() for message in caplog.records]
    assert len(said) == 2
    assert (
        "damaged lines are set aside in records.jsonl.damaged-1: 1 (line 2: not a line of records (JSONDecodeE"
        in said[0]
    )
    (folder / "records.jsonl").write_bytes(b"x\n")
    opened(folder)
    assert (folder / "records.jsonl.damaged-1").read_bytes() == garbled  # nothing is overwritten
    assert (folder / "records.jsonl.damaged-2").read_bytes() == b"x\n"


def test_resuming_leaves_a_sound_folder_alone(folder: Path, caplog) -> None:
    before = content_of(folder)
    opened(folder)
    assert content_of(folder) == before
    assert caplog.text == ""


@pytest.mark.parametrize("line", ["[]", '{"event": "begin", "time": "then"}'])
def test_resuming_sets_lines_of_jobs_aside_that_status_names(folder: Path, line: str) -> None:
    before = (folder / "jobs.jsonl").read_text()
    (folder / "jobs.jsonl").write_text(f"{line}\n{before}")
    (damaged,) = status([folder])
    assert (damaged.state, "jobs.jsonl:1: not a line of jobs" in damaged.why) == ("failed", True)
    opened(folder)
    assert (folder / "jobs.jsonl").read_text() == before


def test_resuming_sets_all_different_records_of_an_example_aside(folder: Path, caplog) -> None:
    lines = [record(0), record(5), record(1, text="another")]
    (folder / "records-1-of-2.jsonl").write_text("".join(f"{line.to_json()}\n" for line in lines))
    with pytest.raises(UserError, match=r"records-1-of-2\.jsonl:3: another record of hotpotqa, row row-1, than .*:2"):
        read_records(folder)
    opened(folder)
    assert [record.id for record in read_records(folder)] == ["row-0", "row-2", "row-5"]
    aside = [(folder / f"records{part}.jsonl.damaged-1").read_text() for part in ("", "-1-of-2")]
    assert aside == [f"{one.to_json()}\n" for one in (record(1), lines[2])]
    assert "line 3: another record of hotpotqa, row row-1" in caplog.text


def test_shard_leaves_files_of_other_shards_alone(tmp_path: Path) -> None:
    with open_store(tmp_path, IDENTITY, {}, "-1-of-2") as store:
        store.append(record(0))
    file = tmp_path / "records-1-of-2.jsonl"
    half = file.read_bytes() + b'{"dataset": "hot'
    file.write_bytes(half)
    with open_store(tmp_path, IDENTITY, {}, "-2-of-2") as other:
        assert list(other.records.values()) == [record(0)]
    assert file.read_bytes() == half
    opened(tmp_path, part="-1-of-2")
    assert file.read_bytes() == record(0).to_json().encode() + b"\n"
    file.write_bytes(b"x\n" + half)
    with pytest.raises(UserError, match=r"records-1-of-2\.jsonl:1: not a line of records"):
        opened(tmp_path, part="-2-of-2")


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Within the block, no file of this process may be larger than `size` bytes: the kernel cuts the write there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("cut", [0, 60, -1])
@pytest.mark.parametrize("name", ["records", "failures", "jobs"])
def test_full_disk_within_a_line_leaves_the_file_unchanged(folder: Path, name: str, cut: int) -> None:
    """Real writes, which the kernel cuts after N bytes of the line (counted from its end if negative)."""
    failure, event = replace(FAILURE, id="row-8"), {"event": "x" * 200}
    with open_store(folder, IDENTITY, {}) as store:
        write, line = {
            "records": (lambda: store.append(record(7)), record(7).to_json()),
            "failures": (lambda: store.fail(failure), failure.to_json()),
            "jobs": (lambda: store.note(event), json.dumps(event)),
        }[name]
        file = folder / f"{name}.jsonl"
        before = file.read_bytes()
        room = cut if cut >= 0 else len(line) + 1 + cut
        with full_disk(len(before) + room), pytest.raises(UserError, match=rf"{name}\.jsonl: .*free some disk space"):
            write()
        assert file.read_bytes() == before
        write()  # there is room again
        assert file.read_bytes() == before + line.encode() + b"\n"


def test_full_disk_leaves_no_half_file(folder: Path, tmp_path_factory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with full_disk(10), pytest.raises(UserError, match=r"run\.json: could not be written .*the same command again"):
        opened(empty)
    with (folder / "records.jsonl").open("ab") as file:
        file.write(b"damaged, in more than ten bytes\n")
    before = content_of(folder)
    with full_disk(10), pytest.raises(UserError, match=r"damaged-1: could not be written"):
        opened(folder)
    assert (content_of(empty), content_of(folder)) == ({}, before)


def test_only_a_whole_run_removes_what_a_killed_process_was_writing(tmp_path: Path) -> None:
    (tmp_path / ".summary.json.0123abcd.partial").write_text("half")
    opened(tmp_path, part="-1-of-2")  # another shard may be writing it
    assert list(tmp_path.glob(".*.partial"))
    opened(tmp_path)
    assert not list(tmp_path.glob(".*.partial"))


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*out=FOLDER"):
        opened(tmp_path / "file" / "run")


FEW = settings(max_examples=settings().max_examples // 4)  # for tests that write files or long values
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
GARBAGE = st.binary(max_size=60).map(lambda data: data.replace(b"\n", b"")) | JSON.map(
    lambda value: json.dumps(value).encode()
)


@contextmanager
def run_folder() -> Iterator[Path]:
    """A folder with a run without records; pytest's fixtures are not renewed for each input."""
    with tempfile.TemporaryDirectory() as name:
        with open_store(Path(name), IDENTITY, {}):
            pass
        yield Path(name)


@st.composite
def damaged_files(draw: st.DrawFn) -> tuple[dict[str, bytes], set[int]]:
    """Files of records with all kinds of damage, and the numbers of the records that can be saved."""
    lines: list[tuple[int | None, bytes]] = []
    for number in range(draw(st.integers(0, 5))):
        line = record(number).to_json().encode()
        lines += [(number, line)] * draw(st.sampled_from([1, 1, 1, 2, 3]))
        if draw(st.booleans()) and draw(st.booleans()):
            lines.append((number, record(number, text="another").to_json().encode()))
    lines += [(None, garbage) for garbage in draw(st.lists(GARBAGE, max_size=3))]
    names = ["records.jsonl", "records-1-of-2.jsonl", "records-2-of-2.jsonl"]
    files = dict.fromkeys(names, b"")
    for _, line in draw(st.permutations(lines)):
        files[draw(st.sampled_from(names))] += line + b"\n"
    versions: dict[int, set[bytes]] = {}
    for number, line in lines:
        if number is not None:
            versions.setdefault(number, set()).add(line)
    good = {number for number, found in versions.items() if len(found) == 1}
    return {name: content for name, content in files.items() if content}, good


@FEW
@given(damaged_files())
def test_resuming_keeps_all_good_records_and_every_line(case: tuple[dict[str, bytes], set[int]]) -> None:
    files, good = case
    with run_folder() as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        for _ in range(2):  # a second time, nothing is left to do
            with open_store(folder, IDENTITY, {}) as store:
                assert {one.key: one for one in store.records.values()} == {
                    record(number).key: record(number) for number in good
                }
        assert {one.key for one in read_records(folder)} == {record(number).key for number in good}
        for name, content in files.items():
            aside = folder / f"{name}.damaged-1"
            left = (folder / name).read_bytes() + (aside.read_bytes() if aside.exists() else b"")
            assert sorted(filter(bytes.strip, left.split(b"\n"))) == sorted(filter(bytes.strip, content.split(b"\n")))
            assert not (folder / f"{name}.damaged-2").exists()


class Jobs(RuleBasedStateMachine):
    """Concurrent jobs of several shards in one folder, killed and restarted, compared with a plain dict."""

    PARTS = ("-1-of-3", "-2-of-3", "-3-of-3")

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.folder = Path(self.directory.name)
        self.open: dict[str, tuple[Any, Any]] = {}
        self.records: dict[tuple[str, str], Record] = {}
        self.failed: dict[tuple[str, str], Failure] = {}
        self.next = 0
        with open_store(self.folder, IDENTITY, {}):
            pass

    def teardown(self) -> None:
        if hasattr(self, "open"):
            for context, _ in self.open.values():
                context.__exit__(None, None, None)
            self.directory.cleanup()

    def store(self, part: str) -> Any:
        if part not in self.open:
            context = open_store(self.folder, IDENTITY, {}, part)
            self.open[part] = context, context.__enter__()
        return self.open[part][1]

    @rule(part=st.sampled_from(PARTS), text=st.text(max_size=5))
    def measure(self, part: str, text: str) -> None:
        one = record(self.next, text=text)
        self.next += 1
        self.store(part).append(one)
        self.records[one.key] = one

    @rule(part=st.sampled_from(PARTS), reason=st.text(max_size=5))
    def fail(self, part: str, reason: str) -> None:
        one = Failure("hotpotqa", f"row-{self.next}", reason, "")
        self.next += 1
        self.store(part).fail(one)
        self.failed[one.key] = one

    @rule(part=st.sampled_from(PARTS))
    def measure_what_failed(self, part: str) -> None:
        if self.failed:
            dataset, row = next(iter(self.failed))
            one = record(int(row.removeprefix("row-")), dataset)
            if one.key not in self.records:
                self.store(part).append(one)
                self.records[one.key] = one

    @rule(part=st.sampled_from(PARTS), share=st.floats(0, 1), name=st.sampled_from(["records", "failures"]))
    def kill(self, part: str, share: float, name: str) -> None:
        """A kill in the middle of a write: the lock is released, and a share of the line remains (1: all of it)."""
        self.store(part)
        context, _ = self.open.pop(part)
        context.__exit__(None, None, None)
        one = record(self.next) if name == "records" else Failure("hotpotqa", f"row-{self.next}", "why", "")
        self.next += 1
        line = one.to_json().encode()
        with (self.folder / f"{name}{part}.jsonl").open("ab") as file:
            file.write(line[: int(share * len(line))])
        if share == 1:
            (self.records if isinstance(one, Record) else self.failed)[one.key] = one  # type: ignore[index]

    @rule(part=st.sampled_from(PARTS))
    def a_second_process_is_refused(self, part: str) -> None:
        self.store(part)
        for other in (part, ""):
            with pytest.raises(UserError, match="another process"):
                open_store(self.folder, IDENTITY, {}, other).__enter__()

    @invariant()
    def readers_see_all_that_was_written_and_nothing_else(self) -> None:
        if hasattr(self, "folder"):
            assert {record.key: record for record in read_records(self.folder)} == self.records
            assert {failure.key: failure for failure in read_failures(self.folder)} == self.failed

    @rule(part=st.sampled_from(PARTS))
    def jobs_see_each_others_work_when_they_look_again(self, part: str) -> None:
        store = self.store(part)
        store.reload()
        assert store.records == self.records
        assert {failure.key for failure in store.failures} == self.failed.keys() - self.records.keys()


TestJobs = Jobs.TestCase
TestJobs.settings = settings(FEW, stateful_step_count=12)
