"""Files written whole, the cache, and the commit of the code that writes them."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from lazyllm.errors import UserError


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, and flush it to the disk. Makes its folder.

    Raises UserError if it cannot be written; an earlier file of this name then stays as it is.
    """
    partial = file.with_name(f".{file.name}.{uuid4().hex[:8]}.partial")  # two processes may write it at the same time
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as opened:
            opened.write(content.encode() if isinstance(content, str) else content)
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(file)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UserError(
            f"{file}: could not be written ({error}). An earlier file of this name is unchanged: fix the cause (such "
            "as a full disk), then run the same command again"
        ) from error


def cache_folder() -> Path:
    """The folder of files that are downloaded or made once: `$LAZYLLM_BENCH_CACHE` or `~/.cache/lazyllm-bench`."""
    return Path(os.environ.get("LAZYLLM_BENCH_CACHE") or "~/.cache/lazyllm-bench").expanduser()


def git_commit() -> str | None:
    """The commit of the checkout that the code runs from, with "+changes" if it is not clean; None outside one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
