"""A run's folder on a real disk: identity, locks, full disks, damage."""

import gzip
import json
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eval.run.status import status
from eval.store.folder import RunStore, fingerprint, open_store, read_visits
from eval.store.record import Visit
from lazyllm.errors import UserError
from tests.eval.store.visits import visit

ARMS = {name: {"method": {"name": name}, "parameters": None} for name in ("baseline", "lazy")}
IDENTITY = {"model": "tiny", "arms": ARMS, "baseline": "baseline", "seed": 0}
ABOUT = {"config": {"model": {"name": "tiny", "paper": None}}}
BEGIN = {"event": "begin", "time": "2026-11-21T10:00:00Z"}


def opened(folder: Path, identity: dict[str, Any] = IDENTITY) -> None:
    with open_store(folder, identity, {}):
        pass


def in_memory(store: RunStore) -> list[Visit]:
    return [visit for visits in store.visits.values() for visit in visits]


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if not file.name.startswith(".lock")
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three visits and a job."""
    with open_store(tmp_path, IDENTITY, ABOUT) as store:
        for number in range(3):
            store.append(visit(number))
        store.note(BEGIN)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "content", "parts"),
    [  # content: None deletes the file, and a folder takes the place of "folder"
        ("run.json", None, ["run.json", "out="]),
        (
            "run.json",
            '{"schema": 2, "identity": {"paired": true}}',
            ["schema 2", "reads 5", "out="],
        ),
        ("run.json", '{"schema": 99, "identity": {}}', ["schema 99", "out="]),
        ("visits.jsonl", "folder", ["visits.jsonl", "out="]),
        ("run.json", "folder", ["run.json", "out="]),
        *(
            ("run.json", text, ["run.json", "Nothing was changed", "out="])
            for text in ("{", "null", '{"schema": 5, "identity": []}', '{"identity": {}}')
        ),
    ],
)
def test_store_refuses_other_folders_without_a_change(
    folder: Path, file: str, content: str | None, parts: list[str]
) -> None:
    (folder / file).unlink(missing_ok=True)
    if content == "folder":
        (folder / file).mkdir()
    elif content is not None:
        (folder / file).write_text(content)
    files = {
        path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".lock")
    }
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(UserError, match=r"\.json") as error:
        opened(folder)
    assert [text for text in parts if text not in str(error.value)] == []
    assert {path: path.read_bytes() for path in files} == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"arms": ARMS | {"lazy": {"method": {"name": "lazy", "schedule": {"2": 0.5}}}}},
            r"arms\.lazy\.method",
        ),
        ({"arms": ARMS | {"more": {}}}, r"arms\.more: null there, {} now\)"),
        ({"device": "another"}, "device: "),
    ],
)
def test_store_refuses_another_identity_and_names_the_difference(
    folder: Path, change: dict, named: str
) -> None:
    with pytest.raises(UserError, match=f"differs \\({named}.*out=FOLDER"):
        opened(folder, IDENTITY | change)
    assert fingerprint(IDENTITY | change) != fingerprint(IDENTITY)


def test_store_refuses_a_second_job(tmp_path: Path) -> None:
    with open_store(tmp_path, IDENTITY, {}) as store:
        with pytest.raises(
            UserError, match=r"another process is working in this run folder \(preparing\)"
        ):
            opened(tmp_path)
        store.note(
            {
                "event": "begin",
                "time": "2026-01-02T03:04:05Z",
                "host": "node7",
                "process": 42,
                "load": {},
            }
        )
        with pytest.raises(UserError, match=r"\(process 42 on node7 since 2026-01-02T03:04:05Z\)"):
            opened(tmp_path)
    opened(tmp_path)  # released


def test_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("eval.store.folder.FileLock.acquire", no_locks)
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(visit(0))
    assert "cannot be locked" in caplog.text


def test_resuming_sets_damaged_lines_aside(folder: Path, caplog) -> None:
    before = content_of(folder)
    opened(folder)
    assert (content_of(folder), caplog.text) == (before, "")  # a sound folder is left alone
    file = folder / "visits.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    garbled = lines[1][:50] + b"\n"
    file.write_bytes(lines[0] + garbled + lines[2] + b'{"half')
    with pytest.raises(
        UserError, match=r"visits\.jsonl:2: not a line of visits.*run the run's command again"
    ):
        read_visits(folder)
    with open_store(folder, IDENTITY, {}) as store:
        assert [key for _, key in store.visits] == ["row-0", "row-2"]
        store.append(visit(1))  # the lost one, measured again
    assert file.read_bytes() == lines[0] + lines[2] + lines[1]
    assert (folder / "visits.jsonl.damaged-1").read_bytes() == garbled
    file.write_bytes(b"x\n")
    opened(folder)
    assert (folder / "visits.jsonl.damaged-1").read_bytes() == garbled  # nothing is overwritten
    assert (folder / "visits.jsonl.damaged-2").read_bytes() == b"x\n"


@pytest.mark.parametrize("line", ["[]", '{"event": "begin", "time": "then"}'])
def test_resuming_sets_lines_of_jobs_aside_that_status_names(folder: Path, line: str) -> None:
    before = (folder / "jobs.jsonl").read_text()
    (folder / "jobs.jsonl").write_text(f"{line}\n{before}")
    (damaged,) = status([folder])
    assert (damaged.state, "jobs.jsonl:1: not a line of jobs" in damaged.why) == ("failed", True)
    opened(folder)
    assert (folder / "jobs.jsonl").read_text() == before


def test_example_may_have_several_visits_and_a_repeated_line_counts_once(
    folder: Path, caplog
) -> None:
    again = visit(1, text="another")
    with (folder / "visits.jsonl").open("a") as file:
        file.write(f"{again.to_json()}\n{visit(0).to_json()}\n\n")
    assert read_visits(folder) == [visit(0), visit(1), visit(2), again]
    assert "visits.jsonl:5: repeats" in caplog.text
    with open_store(folder, IDENTITY, {}) as store:
        assert store.visits == {
            visit(n).key: [visit(n), *([again] if n == 1 else [])] for n in range(3)
        }
        assert store.answered(again.key) == {"baseline", "lazy"}
        assert store.answered(("hotpotqa", "row-9")) == set()


def test_gzipped_visits_are_read_as_they_are_and_no_job_appends_to_them(folder: Path) -> None:
    file = folder / "visits.jsonl"
    packed = folder / "visits.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    file.unlink()
    before = packed.read_bytes()
    assert read_visits(folder) == [visit(0), visit(1), visit(2)]
    with open_store(folder, IDENTITY, {}) as store:
        assert len(store.visits) == 3
        with pytest.raises(
            UserError, match=r"visits\.jsonl\.gz: a job cannot append to it: gunzip it"
        ):
            store.note(BEGIN)
    assert packed.read_bytes() == before
    for damage in (before[:40], gzip.compress(b"x\n")):
        packed.write_bytes(damage)
        with pytest.raises(UserError, match=r"visits\.jsonl\.gz"):
            opened(folder)
        assert packed.read_bytes() == damage


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Within the block, no file of this process may be larger than `size` bytes: the kernel cuts
    the write there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("cut", [0, 60, -1])
@pytest.mark.parametrize("name", ["visits", "jobs"])
def test_full_disk_within_a_line_leaves_the_file_unchanged(
    folder: Path, name: str, cut: int
) -> None:
    """Real writes, which the kernel cuts after N bytes of the line (counted from its end if
    negative)."""
    event = {"event": "x" * 200}
    with open_store(folder, IDENTITY, {}) as store:
        write, line = {
            "visits": (lambda: store.append(visit(7)), visit(7).to_json()),
            "jobs": (lambda: store.note(event), json.dumps(event)),
        }[name]
        file = folder / f"{name}.jsonl"
        before = file.read_bytes()
        room = cut if cut >= 0 else len(line) + 1 + cut
        with (
            full_disk(len(before) + room),
            pytest.raises(UserError, match=rf"{name}\.jsonl: .*free some disk space"),
        ):
            write()
        assert file.read_bytes() == before
        write()  # there is room again
        assert file.read_bytes() == before + line.encode() + b"\n"


def test_full_disk_leaves_no_half_file(folder: Path, tmp_path_factory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with (
        full_disk(10),
        pytest.raises(UserError, match=r"run\.json: could not be written .*the same command again"),
    ):
        opened(empty)
    with (folder / "visits.jsonl").open("ab") as file:
        file.write(b"damaged, in more than ten bytes\n")
    before = content_of(folder)
    with full_disk(10), pytest.raises(UserError, match=r"damaged-1: could not be written"):
        opened(folder)
    assert (content_of(empty), content_of(folder)) == ({}, before)


def test_job_removes_what_a_killed_process_was_writing(tmp_path: Path) -> None:
    (tmp_path / ".summary.json.0123abcd.partial").write_text("half")
    opened(tmp_path)
    assert not list(tmp_path.glob(".*.partial"))


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*out=FOLDER"):
        opened(tmp_path / "file" / "run")


FEW = settings(
    max_examples=settings().max_examples // 4
)  # for tests that write files or long values
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
GARBAGE = st.binary(max_size=60).map(lambda data: data.replace(b"\n", b"")) | JSON.map(
    lambda value: json.dumps(value).encode()
)


@contextmanager
def run_folder() -> Iterator[Path]:
    """A folder with a run without visits; pytest's fixtures are not renewed for each input."""
    with tempfile.TemporaryDirectory() as name:
        with open_store(Path(name), IDENTITY, {}):
            pass
        yield Path(name)


@st.composite
def damaged_files(draw: st.DrawFn) -> tuple[bytes, set[bytes]]:
    """A file of visits with all kinds of damage, and the lines that can be saved."""
    good = [
        visit(number % 4, text=str(number)).to_json().encode()
        for number in range(draw(st.integers(0, 6)))
    ]
    lines = [line for line in good for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])))]
    lines += draw(st.lists(GARBAGE, max_size=3))
    content = b"".join(line + b"\n" for line in draw(st.permutations(lines)))
    return content, {*good}


@FEW
@given(damaged_files())
def test_resuming_keeps_all_good_visits_and_every_line(case: tuple[bytes, set[bytes]]) -> None:
    content, good = case
    with run_folder() as folder:
        file, aside = folder / "visits.jsonl", folder / "visits.jsonl.damaged-1"
        file.write_bytes(content)
        for _ in range(2):  # a second time, nothing is left to do
            with open_store(folder, IDENTITY, {}) as store:
                assert sorted(one.to_json().encode() for one in in_memory(store)) == sorted(good)
        assert {one.to_json().encode() for one in read_visits(folder)} == good
        left = file.read_bytes() + (aside.read_bytes() if aside.exists() else b"")
        assert sorted(filter(bytes.strip, left.split(b"\n"))) == sorted(
            filter(bytes.strip, content.split(b"\n"))
        )
        assert not (folder / "visits.jsonl.damaged-2").exists()


class Jobs(RuleBasedStateMachine):
    """Jobs of a run one after another, killed and restarted, compared with a plain list."""

    @initialize()
    def begin(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.folder = Path(self.directory.name)
        self.open: tuple[Any, Any] | None = None
        self.visits: list[Visit] = []
        with open_store(self.folder, IDENTITY, {}):
            pass

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.close()
            self.directory.cleanup()

    def store(self) -> Any:
        if self.open is None:
            context = open_store(self.folder, IDENTITY, {})
            self.open = context, context.__enter__()
        return self.open[1]

    def close(self) -> None:
        if self.open is not None:
            self.open[0].__exit__(None, None, None)
            self.open = None

    def new(self, row: int) -> Visit:
        """A visit that no other equals, of one of few rows: an example may have several."""
        return visit(row, text=f"visit {len(self.visits)}")

    @rule(row=st.integers(0, 5))
    def measure(self, row: int) -> None:
        one = self.new(row)
        self.store().append(one)
        self.visits.append(one)

    @rule(row=st.integers(0, 5), share=st.floats(0, 1))
    def kill(self, row: int, share: float) -> None:
        """A kill in the middle of a write: the lock is released, and a share of the line remains
        (1: all of it)."""
        self.store()
        self.close()
        one = self.new(row)
        line = one.to_json().encode()
        with (self.folder / "visits.jsonl").open("ab") as file:
            file.write(line[: int(share * len(line))])
        if share == 1:
            self.visits.append(one)

    @invariant()
    def readers_see_all_that_was_written_and_nothing_else(self) -> None:
        if hasattr(self, "folder"):
            found = [one.to_json() for one in read_visits(self.folder)]
            assert sorted(found) == sorted(one.to_json() for one in self.visits)

    @rule()
    def a_job_sees_the_work_of_those_before_it(self) -> None:
        assert sorted(one.to_json() for one in in_memory(self.store())) == sorted(
            one.to_json() for one in self.visits
        )


TestJobs = Jobs.TestCase
TestJobs.settings = settings(FEW, stateful_step_count=12)
