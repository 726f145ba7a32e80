"""A run's folder on a real disk: identity, locks, full disks, damage."""

import gzip
import json
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from eval.run.status import status
from eval.store.folder import RunStore, fingerprint, open_store, read_visits
from eval.store.record import Visit
from lazyllm.errors import UserError
from tests.eval.store.visits import visit

ARMS = {name: {"method": {"name": name}, "parameters": None} for name in ("baseline", "lazy")}
IDENTITY = {"model": "tiny", "arms": ARMS, "baseline": "baseline", "seed": 0}
ABOUT = {"config": {"model": {"name": "tiny", "paper": None}}}
BEGIN = {"event": "begin", "time": "2026-11-21T10:00:00Z"}


def opened(folder: Path, identity: dict[str, Any] = IDENTITY) -> list[Visit]:
    """Open a run's folder once, as a job does, and list its visits."""
    with open_store(folder, identity, {}) as store:
        return [visit for visits in store.visits.values() for visit in visits]


def content_of(folder: Path) -> dict[str, bytes]:
    files = [
        file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".lock")
    ]
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three visits and a job."""
    with open_store(tmp_path, IDENTITY, ABOUT) as store:
        for number in range(3):
            store.append(visit(number))
        store.note(BEGIN)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [  # content: None deletes the file, and a folder takes the place of "folder"
        ("run.json", None, "no run.json"),
        (
            "run.json",
            '{"schema": 2, "identity": {}}',
            r"run\.json: written with schema 2 .*reads 5",
        ),
        ("run.json", '{"schema": 99, "identity": {}}', r"run\.json: written with schema 99"),
        ("visits.jsonl", "folder", r"visits\.jsonl: "),
        ("run.json", "folder", r"run\.json: "),
        *(
            ("run.json", text, r"run\.json: .*Nothing was changed")
            for text in ("{", "null", '{"schema": 5, "identity": []}', '{"identity": {}}')
        ),
    ],
)
def test_store_refuses_other_folders_without_a_change(
    folder: Path, file: str, content: str | None, reason: str
) -> None:
    (folder / file).unlink(missing_ok=True)
    if content == "folder":
        (folder / file).mkdir()
    elif content is not None:
        (folder / file).write_text(content)
    before = content_of(folder)
    with pytest.raises(UserError, match=f"{reason}.*out="):
        opened(folder)
    assert content_of(folder) == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"arms": ARMS | {"lazy": {"method": {"name": "lazy", "keep": 0.5}}}},
            r"arms\.lazy\.method",
        ),
        ({"arms": ARMS | {"more": {}}}, r"arms\.more: null there, {} now"),
        ({"device": "another"}, "device: "),
    ],
)
def test_store_refuses_another_identity_and_names_the_difference(
    folder: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UserError, match=f"out=FOLDER.*They differ: {named}"):
        opened(folder, IDENTITY | change)
    assert fingerprint(IDENTITY | change) != fingerprint(IDENTITY)


def test_store_refuses_a_second_job(tmp_path: Path) -> None:
    with open_store(tmp_path, IDENTITY, {}) as store:
        with pytest.raises(UserError, match=r"is working in this run folder \(preparing\)"):
            opened(tmp_path)
        store.note(BEGIN | {"host": "node7", "process": 42, "load": {}})
        with pytest.raises(UserError, match=r"\(process 42 on node7 since 2026-11-21T10:00:00Z\)"):
            opened(tmp_path)
    opened(tmp_path)  # released


def test_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("eval.store.folder.FileLock.acquire", no_locks)
    assert opened(tmp_path) == []
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
        UserError, match=r"visits\.jsonl:2: not a line.*run the run's command again"
    ):
        read_visits(folder)
    with open_store(folder, IDENTITY, {}) as store:
        assert [key for _, key in store.visits] == ["row-0", "row-2"]
        store.append(visit(1))  # the lost one, measured again
    assert file.read_bytes() == lines[0] + lines[2] + lines[1]
    file.write_bytes(b"x\n")
    opened(folder)
    asides = [(folder / f"visits.jsonl.damaged-{number}").read_bytes() for number in (1, 2)]
    assert asides == [garbled, b"x\n"]  # nothing is overwritten


@pytest.mark.parametrize("line", ["[]", '{"event": "begin", "time": "then"}'])
def test_resuming_sets_lines_of_jobs_aside_that_status_names(folder: Path, line: str) -> None:
    file = folder / "jobs.jsonl"
    before = file.read_text()
    file.write_text(f"{line}\n{before}")
    (damaged,) = status([folder])
    assert (damaged.state, "jobs.jsonl:1: not a line of jobs" in damaged.why) == ("failed", True)
    opened(folder)
    assert file.read_text() == before


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
            visit(row).key: [visit(row), *([again] if row == 1 else [])] for row in range(3)
        }
        assert store.answered(again.key) == {"baseline", "lazy"}
        assert store.answered(("hotpotqa", "row-9")) == set()


def test_gzipped_visits_are_read_as_they_are_and_no_job_appends_to_them(folder: Path) -> None:
    file, packed = folder / "visits.jsonl", folder / "visits.jsonl.gz"
    before = gzip.compress(file.read_bytes())
    packed.write_bytes(before)
    file.unlink()
    assert read_visits(folder) == [visit(0), visit(1), visit(2)]
    with (
        open_store(folder, IDENTITY, {}) as store,
        pytest.raises(UserError, match=r"\.gz: a job cannot append to it: gunzip it"),
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
    """Within the block, the kernel cuts files of this process after `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


EVENT = {"event": "x" * 200}
WRITES: dict[str, tuple[Callable[[RunStore], None], str]] = {  # what is written, and how
    "visits": (lambda store: store.append(visit(7)), visit(7).to_json()),
    "jobs": (lambda store: store.note(EVENT), json.dumps(EVENT)),
}


@pytest.mark.parametrize("cut", [0, 60, -1])
@pytest.mark.parametrize("name", WRITES)
def test_full_disk_within_a_line_leaves_the_file_unchanged(
    folder: Path, name: str, cut: int
) -> None:
    """Real writes, which the kernel cuts after N bytes of the line (from its end if negative)."""
    write, line = WRITES[name]
    with open_store(folder, IDENTITY, {}) as store:
        file = folder / f"{name}.jsonl"
        before = file.read_bytes()
        size = len(before) + cut + (len(line) + 1 if cut < 0 else 0)
        with full_disk(size), pytest.raises(UserError, match=rf"{name}\.jsonl: .*some disk space"):
            write(store)
        assert file.read_bytes() == before
        write(store)  # there is room again
        assert file.read_bytes() == before + line.encode() + b"\n"


def test_full_disk_leaves_no_half_file(folder: Path, tmp_path_factory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    with (
        full_disk(10),
        pytest.raises(UserError, match=r"run\.json: could not be written .*command again"),
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


# for tests that write files or long values
FEW = settings(max_examples=settings().max_examples // 4)
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


def lines_of(visits: list[Visit]) -> list[bytes]:
    return sorted(visit.to_json().encode() for visit in visits)


@st.composite
def damaged_files(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A file of visits with all kinds of damage, and the lines that can be saved."""
    good = lines_of([visit(row % 4, text=str(row)) for row in range(draw(st.integers(0, 6)))])
    lines = [line for line in good for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3])))]
    lines += draw(st.lists(GARBAGE, max_size=3))
    return b"".join(line + b"\n" for line in draw(st.permutations(lines))), good


@FEW
@given(damaged_files())
def test_resuming_keeps_all_good_visits_and_every_line(case: tuple[bytes, list[bytes]]) -> None:
    content, good = case
    with tempfile.TemporaryDirectory() as name:  # pytest's fixtures are not renewed for each input
        folder = Path(name)
        opened(folder)
        file, aside = folder / "visits.jsonl", folder / "visits.jsonl.damaged-1"
        file.write_bytes(content)
        for _ in range(2):  # a second time, nothing is left to do
            assert lines_of(opened(folder)) == good
        assert lines_of(read_visits(folder)) == good
        left = file.read_bytes() + (aside.read_bytes() if aside.exists() else b"")
        kept, given = (sorted(filter(bytes.strip, data.split(b"\n"))) for data in (left, content))
        assert kept == given
        assert not (folder / "visits.jsonl.damaged-2").exists()


class Jobs(RuleBasedStateMachine):
    """Jobs of a run one after another, killed and restarted, compared with a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.folder = Path(self.directory.name)
        opened(self.folder)
        self.job, self.open = ExitStack(), None
        self.visits: list[Visit] = []

    def teardown(self) -> None:
        self.job.close()
        self.directory.cleanup()

    def store(self) -> RunStore:
        if self.open is None:
            self.open = self.job.enter_context(open_store(self.folder, IDENTITY, {}))
        return self.open

    def new(self, row: int) -> Visit:
        """A visit that no other equals, of one of few rows: an example may have several."""
        return visit(row, text=f"visit {len(self.visits)}")

    @rule(row=st.integers(0, 5))
    def measure(self, row: int) -> None:
        made = self.new(row)
        self.store().append(made)
        self.visits.append(made)

    @rule(row=st.integers(0, 5), share=st.floats(0, 1))
    def kill(self, row: int, share: float) -> None:
        """A kill in the middle of a write: a share of the line remains (1: all of it)."""
        self.store()
        self.job.close()
        self.open = None
        made = self.new(row)
        line = made.to_json().encode()
        with (self.folder / "visits.jsonl").open("ab") as file:
            file.write(line[: int(share * len(line))])
        if share == 1:
            self.visits.append(made)

    @invariant()
    def readers_see_all_that_was_written_and_nothing_else(self) -> None:
        assert lines_of(read_visits(self.folder)) == lines_of(self.visits)

    @rule()
    def a_job_sees_the_work_of_those_before_it(self) -> None:
        found = [visit for visits in self.store().visits.values() for visit in visits]
        assert lines_of(found) == lines_of(self.visits)


TestJobs = Jobs.TestCase
TestJobs.settings = settings(FEW, stateful_step_count=12)
