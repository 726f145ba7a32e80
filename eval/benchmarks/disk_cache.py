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

from lazyllm.errors import UserError

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


def bytes_sha256(content: bytes) -> str:
    """SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()


def fetched_once(
    file: Path,
    url: str,
    sha256: str,
    owner: str,
    what: str,
    ways_out: str,
    digest: Callable[[bytes], str] = bytes_sha256,
) -> Path:
    """`file`, fetched from a web address if it is not there.

    owner: whose file it is. what: is not cached yet if the file is not there. ways_out: what a user can do. digest: the
    sha256 of a content, or of the part of it that counts.
    Raises UserError: neither there nor to be had, or another file than that of the hash.
    """
    if file.is_file():
        if digest(file.read_bytes()) != sha256:
            raise UserError(f"{file}: not {owner}'s own (its sha256 differs); delete it to have it fetched anew")
        return file
    require_network(url, what, ways_out)
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
    except OSError as error:
        raise UserError(f"{url} did not come ({error}). {ways_out}") from error
    actual = digest(content)
    if actual != sha256:
        raise UserError(
            f"{url}: refused, the content is not {owner}'s (sha256 {actual}, expected {sha256}). {ways_out}"
        )
    write_atomically(file, content)
    return file


def require_network(url: str, what: str, ways_out: str) -> None:
    """Refuse to fetch what is not cached if the network is forbidden or does not answer. Raises UserError."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise UserError(f"{what} is not cached yet and HF_HUB_OFFLINE is set. {ways_out}")
    if not is_reachable(url):
        raise UserError(f"{what} is not cached yet and {url} does not answer. {ways_out}")


def file_sha256(file: Path) -> str:
    """SHA-256 of a file's content. Raises OSError."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


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
