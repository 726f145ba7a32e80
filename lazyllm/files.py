"""Writing a file completely or not at all, and the folder for downloads."""

import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from lazyllm.errors import UserError


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, flushed to the disk. Makes its folder.

    Raises UserError if it cannot be written; an earlier file of this name then stays as it is.
    """
    # two processes may write it at the same time
    partial = file.with_name(f".{file.name}.{uuid4().hex[:8]}.partial")
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
            f"{file}: could not be written ({error}). An earlier file of this name is unchanged: "
            "fix the cause (such as a full disk), then run the same command again"
        ) from error


def cache_folder() -> Path:
    """Name the folder of files that are downloaded or made once.

    `$LAZYLLM_BENCH_CACHE`, else `lazyllm-bench` in `$XDG_CACHE_HOME` or `~/.cache`.
    """
    users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("LAZYLLM_BENCH_CACHE") or f"{users}/lazyllm-bench"
    return Path(folder).expanduser()
