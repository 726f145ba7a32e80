from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from eval.store.folder import fingerprint, open_store, read_run
from eval.store.record import Failure
from lazyllm.errors import UserError
from tests.eval.store.made import record

ROOT = Path(__file__).resolve().parents[3]
IDENTITY = {"model": "tiny", "method": {"name": "lazy", "schedule": {"2": 0.7}}, "seed": 0}


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"method": {"name": "lazy", "schedule": {"2": 0.5}}}, {"device": "another"}]
)
def test_another_identity_is_refused_and_named(tmp_path: Path, change: dict) -> None:
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
    with pytest.raises(UserError, match=f"differs \\({next(iter(change))}: .*out=FOLDER"):
        open_store(tmp_path, IDENTITY | change, {}).__enter__()
    assert fingerprint(IDENTITY | change) != fingerprint(IDENTITY)


def test_a_shards_half_line_is_left_to_the_shard(tmp_path: Path) -> None:
    with open_store(tmp_path, IDENTITY, {}, "-1-of-2") as store:
        store.append(record(0))
    file = tmp_path / "records-1-of-2.jsonl"
    half = file.read_bytes() + b'{"dataset": "hot'
    file.write_bytes(half)
    with open_store(tmp_path, IDENTITY, {}, "-2-of-2") as other:
        assert list(other.records.values()) == [record(0)]
    assert file.read_bytes() == half
    with open_store(tmp_path, IDENTITY, {}, "-1-of-2"):
        assert file.read_bytes() == record(0).to_json().encode() + b"\n"


@pytest.mark.parametrize(("first", "second"), [("", ""), ("-1-of-2", "-1-of-2"), ("-1-of-2", ""), ("", "-1-of-2")])
def test_a_run_in_two_processes_or_a_shard_beside_the_whole_run_is_refused(
    tmp_path: Path, first: str, second: str
) -> None:
    with (
        open_store(tmp_path, IDENTITY, {}, first),
        pytest.raises(UserError, match="another process"),
        open_store(tmp_path, IDENTITY, {}, second),
    ):
        pass
    with open_store(tmp_path, IDENTITY, {}):
        pass  # released


def test_shards_of_another_run_are_refused(tmp_path: Path) -> None:
    with (
        open_store(tmp_path, IDENTITY, {}, "-1-of-2"),
        pytest.raises(UserError, match=r"differs \(seed"),
        open_store(tmp_path, IDENTITY | {"seed": 1}, {}, "-2-of-2"),
    ):
        pass
    (tmp_path / "run.json").unlink()
    (tmp_path / "records-1-of-2.jsonl").write_text(record(0).to_json() + "\n")
    with pytest.raises(UserError, match=r"no run\.json"):
        open_store(tmp_path, IDENTITY, {}, "-2-of-2").__enter__()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text(record(0).to_json() + "\n")
    with pytest.raises(UserError, match=r"no run\.json"):
        open_store(tmp_path, IDENTITY, {}).__enter__()
    (tmp_path / "run.json").write_text(json.dumps({"schema": 99, "identity": IDENTITY}))
    with pytest.raises(UserError, match=r"run\.json: written with schema 99, this version reads 2; give another out="):
        open_store(tmp_path, IDENTITY, {}).__enter__()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        open_store(file / "run", IDENTITY, {}).__enter__()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch, caplog) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("eval.store.folder.FileLock.acquire", no_locks)
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
    assert "cannot be locked" in caplog.text


# -------------------------------------------------------------------------------------------------- damaged by hand


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Within the block, no file of this process may be larger than `size` bytes: the kernel cuts the write there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_two_records_of_one_example_are_refused_and_both_named(tmp_path: Path) -> None:
    with open_store(tmp_path, IDENTITY, {}, "-1-of-2") as one, open_store(tmp_path, IDENTITY, {}, "-2-of-2") as two:
        one.append(record(0))
        two.append(record(1))
        two.append(record(0, text="another"))
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    message = r"records-2-of-2\.jsonl:2: another record of hotpotqa, row row-0, than .*records-1-of-2\.jsonl:1"
    with pytest.raises(UserError, match=message) as error:
        read_run(tmp_path)
    assert f"lazyllm-bench repair {tmp_path}" in str(error.value)
    with pytest.raises(UserError, match=message), open_store(tmp_path, IDENTITY, {}):
        pass
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert after == before


@pytest.mark.parametrize("name", ["records.jsonl", "failures.jsonl", "run.json"])
def test_a_folder_where_a_file_belongs_is_named(tmp_path: Path, name: str) -> None:
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{name}: cannot be read.*directory"):
        open_store(tmp_path, IDENTITY, {}).__enter__()


@pytest.mark.parametrize(
    "content", ["", "{", '{"schema": 2', "[]", "null", '{"schema": 2, "identity": []}', '{"identity": {}}', "\0\0\0"]
)
def test_a_damaged_description_is_refused_with_what_to_do(tmp_path: Path, content: str) -> None:
    with open_store(tmp_path, IDENTITY, {}) as store:
        store.append(record(0))
    file = tmp_path / "run.json"
    file.write_text(content)
    for read in (read_run, lambda folder: open_store(folder, IDENTITY, {}).__enter__()):
        with pytest.raises(UserError, match=r"run\.json: cannot be read .*Nothing was changed.*lazyllm-bench repair"):
            read(tmp_path)
    assert file.read_text() == content


@pytest.mark.parametrize("cut", [0, 1, 60, -2, -1])
def test_a_disk_that_is_full_within_a_line_leaves_the_file_as_it_was(tmp_path: Path, cut: int) -> None:
    """Real writes, which the kernel cuts after N bytes of the line (counted from its end if negative)."""
    failure = Failure("hotpotqa", "row-9", "no memory", "...")
    with open_store(tmp_path, IDENTITY, {}) as store:
        for write, line, name in (
            (lambda: store.append(record(1)), record(1).to_json(), "records.jsonl"),
            (lambda: store.fail(failure), failure.to_json(), "failures.jsonl"),
            (lambda: store.note({"event": "x" * 200}), json.dumps({"event": "x" * 200}), "jobs.jsonl"),
        ):
            store.append(record(0))
            store.fail(replace(failure, id="row-8"))
            store.note({"event": "begin", "time": "2026-11-21T10:00:00Z"})
            file = tmp_path / name
            before = file.read_bytes()
            room = cut if cut >= 0 else len(line) + 1 + cut
            with (
                full_disk(len(before) + room),
                pytest.raises(UserError, match=rf"{name}: the line could not be written .*Those before it are safe"),
            ):
                write()
            assert file.read_bytes() == before
            write()  # there is room again
            assert file.read_bytes() == before + line.encode() + b"\n"
            for path in tmp_path.glob("*.jsonl"):
                path.unlink()


def test_a_disk_that_is_full_from_the_start_leaves_no_half_description(tmp_path: Path) -> None:
    with full_disk(10), pytest.raises(UserError, match=r"run\.json: could not be written .*the same command again"):
        open_store(tmp_path, IDENTITY, {}).__enter__()
    assert [file.name for file in tmp_path.iterdir() if not file.name.startswith(".lock")] == []
    full = pytest.raises(UserError, match=r"summary\.json: could not be written")
    with open_store(tmp_path, IDENTITY, {}) as store, full_disk(10), full:
        store.write("summary.json", "x" * 20)
    assert not (tmp_path / "summary.json").exists()
    assert not list(tmp_path.glob(".*.partial"))


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".summary.json.0123abcd.partial").write_text("half")
    with open_store(tmp_path, IDENTITY, {}, "-1-of-2"):  # another shard may be writing it
        assert list(tmp_path.glob(".*.partial"))
    with open_store(tmp_path, IDENTITY, {}):
        assert not list(tmp_path.glob(".*.partial"))


READ_ONLY = """
import os, sys
from pathlib import Path
from eval.store.folder import open_store, read_run
from lazyllm.errors import UserError
if os.getuid() == 0:  # root may write anywhere
    os.setgid(65534)
    os.setuid(65534)
folder = Path(sys.argv[1])
print(len(read_run(folder)[1]))
for place in (folder, folder / "new"):
    try:
        open_store(place, {}, {}).__enter__()
    except UserError as error:
        print(error)
"""


def test_a_read_only_folder_can_be_read_and_is_refused_to_runs() -> None:
    folder = Path(tempfile.mkdtemp())  # not pytest's folder, which other users cannot enter
    try:
        with open_store(folder / "run", IDENTITY, {}) as store:
            store.append(record(0))
        for place in (folder, folder / "run"):
            place.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY, str(folder / "run")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        count, existing, new = done.stdout.splitlines()
        assert count == "1", done.stderr
        assert existing.startswith(f"{folder / 'run'}: the run folder cannot be written ([Errno 13]")
        assert new.startswith(f"{folder / 'run' / 'new'}: the run folder cannot be written ([Errno 13]")
        assert "give another with out=FOLDER" in existing
    finally:
        folder.chmod(0o755)
        (folder / "run").chmod(0o755)
        shutil.rmtree(folder)


HOLD = """
import sys
from pathlib import Path
from eval.store.folder import open_store
with open_store(Path(sys.argv[1]), {}, {}):
    print("has it", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_held_against_a_real_process_and_free_once_that_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=ROOT,
        env=os.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "has it\n"
        with pytest.raises(UserError, match="another process is working in this run folder"):
            open_store(tmp_path, {}, {}).__enter__()
    finally:
        holder.kill()
        holder.communicate()
    with open_store(tmp_path, {}, {}) as store:
        store.append(record(0))
