"""The store with arbitrary damage: whole lines are never lost, damaged ones are never read as records."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from eval.store.folder import open_store, read_failures, read_run
from eval.store.record import Failure, Record
from lazyllm.errors import UserError
from tests.eval.store.made import record
from tests.eval.store.test_folder import IDENTITY

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
        assert {one.key for one in read_run(folder)[1]} == {record(number).key for number in good}
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
            assert {record.key: record for record in read_run(self.folder)[1]} == self.records
            assert {failure.key: failure for failure in read_failures(self.folder)} == self.failed

    @rule(part=st.sampled_from(PARTS))
    def jobs_see_each_others_work_when_they_look_again(self, part: str) -> None:
        store = self.store(part)
        store.reload()
        assert store.records == self.records
        assert {failure.key for failure in store.failures} == self.failed.keys() - self.records.keys()


TestJobs = Jobs.TestCase
TestJobs.settings = settings(FEW, stateful_step_count=12)
