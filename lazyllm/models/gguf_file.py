"""GGUF files as checkpoints: transformers reads each file once, and what it read is kept.

transformers would read the file at every load. So `converted` keeps config and tokenizer, and
`dequantised` the weights, as a checkpoint's folder below `cache_folder()`, by the file's SHA-256,
the versions of the packages that read it, and the code that calls them.
"""

import hashlib
import importlib.metadata
import logging
import shutil
from contextlib import suppress
from pathlib import Path
from time import time_ns

from filelock import FileLock

from lazyllm.errors import UserError
from lazyllm.files import cache_folder, write_whole

log = logging.getLogger(__name__)

_QUANTISATION = "quantisation.txt"  # in the folder of `converted`
_READERS = ("transformers", "gguf", "accelerate")  # transformers needs the others for GGUF files
_CODE = Path(__file__).with_name("gguf_reading.py")
# a younger file may change once more within the same tick of its file system's clock
_SETTLED_NS = 10 * 10**9


def converted(file: Path) -> Path:
    """Find a folder with the config, tokenizer and end tokens of a GGUF file.

    Raises UserError for a file that is damaged, a part of one, or beyond what transformers reads,
    and without the packages that read it.
    """
    return _kept(file)


def dequantised(file: Path, dtype: str) -> Path:
    """Find such a folder with the weights too, de-quantised and rounded. Raises UserError."""
    return _kept(file, dtype)


def quantisation_of(file: Path) -> str:
    """Read the file's quantisation, such as "Q4_K_M". Raises UserError as `converted` does."""
    return (converted(file) / _QUANTISATION).read_text(encoding="utf-8")


def sha256_of(file: Path) -> str:
    """Compute the SHA-256 of a file, kept in the cache folder until the file's state changes."""
    state = _state(file)
    name = hashlib.sha256(repr(state).encode()).hexdigest()[:32]
    kept = cache_folder() / "gguf" / "sha256" / name
    with suppress(OSError):
        return kept.read_text(encoding="ascii")
    began = time_ns()
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if _state(file) == state and began - max(state[2:4]) > _SETTLED_NS:
        with suppress(UserError):  # a cache that cannot be written costs time only
            write_whole(kept, digest)
    return digest


def _state(file: Path) -> tuple[int, int, int, int, str]:
    """Read (inode, size, times of the last change of content and of anything, path).

    No program can set the last time.
    """
    about = file.stat()
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns, str(file.resolve())


def _kept(file: Path, dtype: str | None = None) -> Path:
    """Make the folder once: a process that is killed leaves none, and others wait for it."""
    try:
        versions = [importlib.metadata.version(package) for package in _READERS]
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"{file.name}: GGUF files need the package {error.name}: pip install "
            "'lazyllm-bench[gguf]'"
        ) from error
    code = hashlib.sha256(_CODE.read_bytes()).hexdigest()[:8]
    suffix = [] if dtype is None else [dtype]
    folder = (
        cache_folder() / "gguf" / "-".join([sha256_of(file)[:32], *versions[:2], code, *suffix])
    )
    if folder.is_dir():
        return folder
    about = None if dtype is None else converted(file)
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            if not folder.is_dir():
                what = "config and tokenizer" if dtype is None else f"weights in {dtype}"
                log.info("reading %s of %s into %s, once", what, file, folder)
                partial.mkdir()
                try:
                    _fill(partial, file, about, dtype)
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"{file}: what was read from it could not be kept in {folder.parent} ({error})"
        ) from error
    return folder


def _fill(folder: Path, file: Path, about: Path | None, dtype: str | None) -> None:
    from lazyllm.models import gguf_reading  # not at the top: it imports torch

    if about is None or dtype is None:
        quantisation = gguf_reading.convert(file, folder)
        (folder / _QUANTISATION).write_text(quantisation, encoding="utf-8")
    else:
        gguf_reading.dequantise(file, about, dtype, folder)
