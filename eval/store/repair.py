"""Repair damaged run folders: `lazyllm-bench repair FOLDER ...`.

A damaged file is copied first (records.jsonl.damaged-1). Then:
- invalid lines are removed, and all records of an example that differ, as the right one is unknown; the run's command
  measures these examples again;
- of equal lines, one stays;
- run.json is restored from summary.json. Without a summary, the records' run is unknown, and nothing is changed; if
  there are no records, run.json is set aside and the run's command starts again.
All other lines stay unchanged. A last line cut short by a kill is not damage; the run removes it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from eval.store.folder import NO_LINE, VERSION, about_text, files_of, held_alone, lines_of, read_about, write_whole
from eval.store.record import Failure, Record, job_event
from lazyllm.errors import UserError

_Lines = dict[Path, list[tuple[int, str, Any]]]  # of each file, from `lines_of`
_Reasons = dict[tuple[Path, int], str]  # {(file, line number): why the line is removed}

_PARSE: dict[str, Callable[[str], Any]] = {
    "records": Record.from_json,
    "failures": Failure.from_json,
    "jobs": job_event,
}


def repair(folder: Path) -> list[str]:
    """Repair one run folder; returns a line for each damaged file.

    Raises UserError, without changes, for a folder without a run, of a running process, of another version, or with
    records of an unknown run.
    """
    if not (folder / "run.json").exists() and not files_of(folder, "records"):
        raise UserError(f"{folder}: not a run folder: it holds neither run.json nor records")
    with held_alone(folder):
        done = _mend_about(folder)
        for name, parse in _PARSE.items():
            lines = {file: list(lines_of(file, parse)) for file in files_of(folder, name)}
            bad = _invalid(lines)
            if name == "records":
                bad |= _repeated(lines)
            for file, of_file in lines.items():
                reasons = {number: reason for (place, number), reason in bad.items() if place == file}
                if reasons:
                    done.append(_take_out(file, of_file, reasons))
    return done


def _mend_about(folder: Path) -> list[str]:
    """Restore run.json if it is damaged. Raises UserError if that is impossible."""
    file = folder / "run.json"
    schema = _schema(file)
    if schema is not None and schema != VERSION:
        raise UserError(
            f"{file}: has schema {schema}, but this version reads {VERSION}; nothing was changed: use the version that "
            "wrote it"
        )
    with suppress(UserError):
        read_about(file)
        return []
    text = _about_from_summary(folder / "summary.json")
    if text is None and files_of(folder, "records"):
        raise UserError(
            f"{file}: cannot be read, and there is no summary.json to restore it from; nothing was changed: copy the "
            "run.json of another run of the same command, or start a new run"
        )
    if file.is_dir():
        raise UserError(f"{file}: not a file; nothing was changed: remove it")
    aside = _copy_aside(file) if file.exists() else None
    if text is None:
        file.unlink()
        return [f"run.json: could not be read; set aside as {aside}. There are no records: the run starts again"]
    write_whole(file, text)
    kept = f"; copy: {aside}" if aside else ""
    return [f"run.json: could not be read; restored from summary.json{kept}"]


def _schema(file: Path) -> Any:
    """The schema in run.json; None if it cannot be read."""
    try:
        return json.loads(file.read_bytes())["schema"]
    except (OSError, *NO_LINE):
        return None


def _about_from_summary(file: Path) -> str | None:
    """run.json's text from the summary, which repeats it; None if the summary cannot be read."""
    try:
        content = json.loads(file.read_bytes())
        identity, config = content["identity"], content["config"]
        if not isinstance(identity, dict) or not isinstance(config, dict):
            return None
        about = {key: value for key, value in content.items() if key not in ("rows", "identity")}
    except (OSError, *NO_LINE):
        return None
    return about_text(identity, about)


def _invalid(lines: _Lines) -> _Reasons:
    return {
        (file, number): f"{type(line).__name__}: {line}"
        for file, of_file in lines.items()
        for number, _, line in of_file
        if isinstance(line, Exception)
    }


def _repeated(lines: _Lines) -> _Reasons:
    """Copies of a record after the first, and all of several different records of one example."""
    places: dict[tuple[str, str], list[tuple[Path, int, Record]]] = {}
    for file, of_file in lines.items():
        for number, _, line in of_file:
            if isinstance(line, Record):
                places.setdefault(line.key, []).append((file, number, line))
    bad: _Reasons = {}
    for (dataset, row), copies in places.items():
        first_file, first_number, first = copies[0]
        if all(record == first for _, _, record in copies):
            reason, taken = f"equal to {first_file.name}:{first_number}", copies[1:]
        else:
            listed = ", ".join(f"{file.name}:{number}" for file, number, _ in copies)
            reason, taken = f"different records of {dataset}, row {row}, in {listed}", copies
        bad |= {(file, number): reason for file, number, _ in taken}
    return bad


def _take_out(file: Path, lines: Sequence[tuple[int, str, Any]], reasons: dict[int, str]) -> str:
    """Remove lines from a file, after copying it."""
    kept = [text for number, text, _ in lines if number not in reasons]
    aside = _copy_aside(file)
    write_whole(file, "".join(f"{text}\n" for text in kept))
    listed = "; ".join(f"line {number}: {reason}" for number, reason in sorted(reasons.items())[:5])
    more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return f"{file.name}: {len(reasons)} lines removed, {len(kept)} kept; copy: {aside} ({listed}{more})"


def _copy_aside(file: Path) -> str:
    """Copy a file to a new name in its folder; returns the name. Raises UserError."""
    names = (file.with_name(f"{file.name}.damaged-{number}") for number in count(1))
    copy = next(name for name in names if not name.exists())
    try:
        with copy.open("xb") as opened:
            opened.write(file.read_bytes())
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise UserError(f"{copy}: could not be written ({error}); nothing was changed: free space first") from error
    return copy.name


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns 0 if every folder is in order now, 1 if a folder could not be repaired."""
    parser = argparse.ArgumentParser(prog="lazyllm-bench repair", description="Repair damaged run folders.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run's folder")
    status = 0
    for folder in parser.parse_args(argv).folders:
        try:
            done = repair(folder)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
            continue
        print("\n".join(f"{folder / line}" for line in done) if done else f"{folder}: nothing to repair")
        if done:
            print(f"{folder}: the run's command measures the missing examples")
    return status
