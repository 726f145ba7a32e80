"""`lazyllm-bench repair` on run folders damaged by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.run.status import status
from eval.store.folder import fingerprint, open_store, read_failures, read_run
from eval.store.record import Failure
from eval.store.repair import main, repair
from lazyllm.errors import UserError
from tests.eval.store.made import record
from tests.eval.store.test_folder import IDENTITY

ABOUT = {"config": {"limit": 3, "model": {"name": "tiny"}}, "provenance": {"started": "then"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of three records and a failure, with its summary."""
    with open_store(tmp_path, IDENTITY, ABOUT) as store:
        for number in range(3):
            store.append(record(number))
        store.fail(Failure("hotpotqa", "row-7", "no memory", "..."))
        store.note({"event": "begin", "time": "2026-11-21T10:00:00Z"})
        store.write("summary.json", json.dumps({"rows": [], **ABOUT, "identity": IDENTITY}))
    return tmp_path


def content_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".lock")}


def test_a_sound_folder_is_left_alone(folder: Path, capsys) -> None:
    before = content_of(folder)
    assert main([str(folder)]) == 0
    assert "nothing to repair" in capsys.readouterr().out
    assert content_of(folder) == before


def test_garbled_lines_are_taken_out_and_the_file_is_kept_as_it_was(folder: Path, capsys) -> None:
    lines = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    damaged = lines[0] + lines[1][:50] + b"\n" + lines[2] + b'{"half'
    (folder / "records.jsonl").write_bytes(damaged)
    (folder / "failures.jsonl").write_bytes(b"\xff\n" + (folder / "failures.jsonl").read_bytes())
    with pytest.raises(UserError, match=rf"records\.jsonl:2: not a record.*lazyllm-bench repair {folder}"):
        read_run(folder)
    assert main([str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "records.jsonl: 1 lines removed, 2 kept; copy: records.jsonl.damaged-1 (line 2: JSONDecodeE" in shown
    assert "failures.jsonl: 1 lines removed, 1 kept; copy: failures.jsonl.damaged-1" in shown
    assert (folder / "records.jsonl").read_bytes() == lines[0] + lines[2]
    assert (folder / "records.jsonl.damaged-1").read_bytes() == damaged
    assert [failure.id for failure in read_failures(folder)] == ["row-7"]
    with open_store(folder, IDENTITY, ABOUT) as store:
        assert [record.id for record in store.records.values()] == ["row-0", "row-2"]
        store.append(record(1))  # the lost one, measured again
    (folder / "records.jsonl").write_bytes(b"\n".join([*lines, b"x", b""]))
    repair(folder)
    assert (folder / "records.jsonl.damaged-1").read_bytes() == damaged  # nothing is overwritten
    assert (folder / "records.jsonl.damaged-2").exists()


def test_a_tail_that_is_json_and_no_record_is_not_kept(folder: Path) -> None:
    lines = (folder / "records.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "records.jsonl").write_bytes(lines[0] + b"x\n" + lines[2] + b"17")
    repair(folder)
    assert [record.id for record in read_run(folder)[1]] == ["row-0", "row-2"]
    assert repair(folder) == []


@pytest.mark.parametrize("line", ["[]", '{"time": "2026-11-21T10:00:00Z"}', '{"event": "begin", "time": "then"}'])
def test_what_status_cannot_read_of_the_jobs_is_taken_out(folder: Path, line: str) -> None:
    before = (folder / "jobs.jsonl").read_text()
    (folder / "jobs.jsonl").write_text(f"{line}\n{before}")
    (damaged,) = status([folder])
    assert (damaged.state, "jobs.jsonl:1: not a job's begin or end" in damaged.why) == ("failed", True)
    assert f"lazyllm-bench repair {folder}" in damaged.why
    (done,) = repair(folder)
    assert done.startswith("jobs.jsonl: 1 lines removed, 1 kept")
    assert (folder / "jobs.jsonl").read_text() == before
    assert "not a job's" not in status([folder])[0].why


def test_of_copies_one_stays_and_of_different_records_none(folder: Path) -> None:
    with open_store(folder, IDENTITY, ABOUT, "-1-of-2") as store:
        store.append(record(5))
    lines = [record(0), record(5), record(1, text="another")]
    (folder / "records-1-of-2.jsonl").write_text("".join(f"{line.to_json()}\n" for line in lines))
    done = repair(folder)
    assert [record.id for record in read_run(folder)[1]] == ["row-0", "row-2", "row-5"]
    assert done[0].startswith("records.jsonl: 1 lines removed, 2 kept")
    assert "line 2: different records of hotpotqa, row row-1, in records.jsonl:2, records-1-of-2.jsonl:3" in done[0]
    assert "line 1: equal to records.jsonl:1" in done[1]


@pytest.mark.parametrize("content", [None, b"", b'{"schema": 2, "ident', b"[]", b"\0" * 99])
def test_a_description_is_put_together_from_the_summary(folder: Path, content: bytes | None) -> None:
    before = json.loads((folder / "run.json").read_text())
    (folder / "run.json").unlink()
    if content is not None:
        (folder / "run.json").write_bytes(content)
    (done,) = repair(folder)
    assert "restored from summary.json" in done
    assert json.loads((folder / "run.json").read_text()) == before
    assert before["fingerprint"] == fingerprint(IDENTITY)
    if content is not None:
        assert (folder / "run.json.damaged-1").read_bytes() == content
    with open_store(folder, IDENTITY, ABOUT) as store:
        assert len(store.records) == 3


@pytest.mark.parametrize("content", [None, b'{"schema": 2, "ident', b'{"schema": 1, "identity": {}}'])
@pytest.mark.parametrize("summary", [None, b"", b'{"rows": []}', b"[]"])
def test_records_of_nobody_are_left_alone(folder: Path, content: bytes | None, summary: bytes | None) -> None:
    for name, new in (("run.json", content), ("summary.json", summary)):
        (folder / name).unlink()
        if new is not None:
            (folder / name).write_bytes(new)
    before = content_of(folder)
    with pytest.raises(UserError, match="nothing was changed"):
        repair(folder)
    assert content_of(folder) == before


def test_a_damaged_description_of_no_records_is_set_aside(tmp_path: Path, capsys) -> None:
    (tmp_path / "run.json").write_text("{")
    assert main([str(tmp_path)]) == 0
    assert "the run starts again" in capsys.readouterr().out
    assert (tmp_path / "run.json.damaged-1").read_text() == "{"
    with open_store(tmp_path, IDENTITY, ABOUT):
        pass


def test_folders_that_cannot_be_mended_are_named_and_the_others_go_on(folder: Path, tmp_path: Path, capsys) -> None:
    (folder / "records.jsonl").write_text("x\n")
    (folder / "empty").mkdir()
    assert main([str(folder / "nosuch"), str(folder / "empty"), str(folder)]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("not a run folder") == 2
    assert "1 lines removed, 0 kept" in shown.out
    assert not (folder / "nosuch").exists()


def test_a_folder_in_which_a_job_works_is_refused(folder: Path) -> None:
    with open_store(folder, IDENTITY, ABOUT, "-1-of-2"), pytest.raises(UserError, match="another process"):
        repair(folder)


def test_a_full_disk_changes_nothing(folder: Path, monkeypatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    (folder / "records.jsonl").write_bytes((folder / "records.jsonl").read_bytes() + b"x\n")
    before = (folder / "records.jsonl").read_bytes()
    monkeypatch.setattr("eval.store.repair.os.fsync", full)
    with pytest.raises(UserError, match="No space left"):
        repair(folder)
    assert (folder / "records.jsonl").read_bytes() == before
