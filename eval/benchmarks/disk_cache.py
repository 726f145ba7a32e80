"""Files that are fetched or made once, and whether there is a network to fetch them.

They lie in `$LAZYLLM_BENCH_CACHE`, or `~/.cache/lazyllm-bench`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The folder for everything that is fetched or made once."""
    return Path(os.environ.get("LAZYLLM_BENCH_CACHE") or "~/.cache/lazyllm-bench").expanduser()


def made_once(file: Path, key: str, make: Callable[[], bytes]) -> bytes:
    """The result of `make`: read from `file` if an earlier call wrote it under the same key, else made and written.

    The file's first line holds the key and the sha256 of the rest, so an outdated or damaged file is made again.
    A folder that cannot be written is no error: the next call makes the content again.
    """
    try:
        header, _, content = file.read_bytes().partition(b"\n")
        if header == _header(key, content):
            return content
    except OSError:
        pass  # not made yet
    content = make()
    try:
        write_atomically(file, _header(key, content) + b"\n" + content)
    except OSError as error:
        log.warning("%s could not be written (%s): the next run makes its content again", file, error)
    return content


def write_atomically(file: Path, content: bytes) -> None:
    """Write a file that other processes see whole or not at all. Makes its folder. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)
        os.replace(partial, file)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _header(key: str, content: bytes) -> bytes:
    return f"{key} {hashlib.sha256(content).hexdigest()}".encode()


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def is_reachable(url: str, timeout_s: float = 3.0) -> bool:
    """Whether a web server answers within `timeout_s` seconds, if only with an error page.

    Asked before a download: the hub's client tries for 23 seconds to find a host that does not exist. The question runs
    in a thread of its own because looking up a name has no time limit.
    """
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s).close()
        except urllib.error.HTTPError:
            pass  # an error page is an answer
        except (OSError, ValueError):
            return
        answered.set()

    thread = threading.Thread(target=ask, name="is_reachable", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answered.is_set()
