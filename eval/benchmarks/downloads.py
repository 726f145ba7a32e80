"""Datasets of the hub by the package `datasets`, single files by their address, and the cache folder; with and without
a network."""

import hashlib
import http.client
import logging
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from eval.benchmarks.rows import Rows, canonical
from eval.benchmarks.suite import Dataset, DataSettings
from eval.benchmarks.tables import read_table
from lazyllm.errors import UserError, reason_of
from lazyllm.files import cache_folder

log = logging.getLogger(__name__)
_warn_once = cache(log.warning)


@cache
def hub_is_reachable() -> bool:
    """Whether the hub answers; False if HF_HUB_OFFLINE is set. Asked once a process, as it may take seconds."""
    from huggingface_hub import constants

    return not is_offline() and is_reachable(constants.ENDPOINT)


@dataclass(frozen=True)
class HubDataset:
    """A dataset of the hub, by the package `datasets`. give: the files that may be in `data.dir` instead, for messages.

    Its methods raise UserError if it is neither cached nor downloadable.
    """

    repository: str
    give: str

    def is_cached(self) -> bool:
        """Whether it is in the cache of `datasets`, without its slow import."""
        from huggingface_hub import constants

        folder = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
        *owner, name = self.repository.split("/")
        # as `datasets.naming` does: an underscore before each capital of a word
        name = re.sub(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
        return (Path(folder).expanduser() / "___".join([*owner, name])).is_dir()

    def absent(self, reason: str = "") -> str | None:
        """Why it cannot be loaded, without importing `datasets`; None if it can. reason: of a load that failed."""
        if not reason and (self.is_cached() or hub_is_reachable()):
            return None
        return (
            f"{self.repository} is not cached and cannot be downloaded{reason}: give data.dir=FOLDER with {self.give}, "
            "or run once with a network"
        )

    def missing(self, dataset: Dataset, settings: DataSettings) -> str | None:
        """`absent`, or None if there is a `data.dir`."""
        return self.absent() if settings.dir is None else None

    def split(self, configuration: str | None, split: str) -> Any:
        """A split, from the cache or the hub."""
        from datasets import config, load_dataset
        from datasets.exceptions import DatasetsError

        offline = config.HF_HUB_OFFLINE
        try:
            # without a network, `datasets` tries for half a minute before it reads its cache
            config.HF_HUB_OFFLINE = offline or not hub_is_reachable()
            return load_dataset(self.repository, configuration, split=split)
        except (OSError, ValueError, DatasetsError) as error:
            raise UserError(self.absent(f" ({reason_of(error)})")) from error
        finally:
            config.HF_HUB_OFFLINE = offline

    def rows(
        self,
        settings: DataSettings,
        pattern: str = "",
        configuration: str | None = None,
        split: str = "train",
        where: Mapping[str, Any] | None = None,
    ) -> Rows:
        """The rows of the files in `data.dir` whose names match `pattern`, or without a folder of a split.

        where: {column of the split: the value that its rows must have}.
        """
        if settings.dir is None:
            source = self.repository if configuration is None else f"{self.repository}, {configuration}"
            table = self.split(configuration, split)
            numbers = _find_rows(table, where or {})
            rows = [(f"{source}, row {number + 1}", dict(table[number])) for number in numbers]
        else:
            source = str(settings.dir.expanduser())
            files = sorted(map(str, Path(source).glob(pattern)))
            if not files:
                raise UserError(f"data.dir={source}: no file {pattern} is there; give data.dir=FOLDER with {self.give}")
            rows = [row for file in files for row in read_table(file)[0]]
        return rows, source, hashlib.sha256(b"\n".join(canonical(row) for _, row in rows)).hexdigest()


def _find_rows(table: Any, where: Mapping[str, Any]) -> list[int]:
    """Return the numbers, from 0, of the rows whose columns have these values. Raises UserError for no column."""
    numbers = list(range(len(table)))
    for column, wanted in where.items():
        if column not in table.column_names:
            raise UserError(f"where: no column {column!r}: the rows have {', '.join(table.column_names)}")
        values = list(table[column])
        numbers = [number for number in numbers if values[number] == wanted]
    return numbers


def given_file(folder: Path, name: str, give: str) -> Path:
    """A file of the user's folder. give: the content that the folder must have. Raises UserError if it is missing."""
    file = folder.expanduser() / name
    if not file.is_file():
        packed = f" ({name}.gz is there: gunzip it)" if Path(f"{file}.gz").is_file() else ""
        raise UserError(f"data.dir={folder}: {name} is missing{packed}; give data.dir=FOLDER with {give}")
    return file


def official_file(owner: str, name: str, url: str, sha256: str, folder: Path | None, give: str) -> bytes:
    """The content of a file by a suite's authors: the user's copy, or downloaded once into `official_cache`.

    owner: the suite, for messages. name: the file's path in both folders. folder: the user's (`data.dir`), or None.
    give: the content that the user's folder must have.
    Raises UserError if the file is missing or cannot be downloaded, or if the downloaded one has another hash. If the
    user's has, the log says so once.
    """
    if folder is not None:
        file = given_file(folder, name, give)
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            differs = f"{file}: differs from {owner}'s own ({url})"
            _warn_once(f"{differs}, so scores are not comparable with published ones")
        return content
    cache = official_cache(owner)
    file, ways_out = cache / name, ways_out_of(give, str(cache))
    if not file.is_file():
        import pooch  # not at the top: it is slow to import, for this alone

        require_network(url, f"{owner}'s {name}", ways_out)
        pooch.get_logger().setLevel(logging.WARNING)
        download: Any = pooch.HTTPDownloader(timeout=30)
        try:
            pooch.retrieve(url, None, file.name, file.parent, downloader=download)
        except OSError as error:
            raise UserError(f"{url} could not be downloaded ({error}). {ways_out}") from error
    content = file.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        file.unlink()  # the next run downloads it again
        raise UserError(f"{url}: not {owner}'s own (sha256 {found}, expected {sha256}). {ways_out}")
    return content


def cached_file(repository: str, name: str, revision: str | None) -> Path | None:
    """A file of a dataset in the hub's cache; None if it is not there. revision: None for the newest."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repository, name, revision=revision, repo_type="dataset")
    return Path(cached) if isinstance(cached, str) else None


def hub_file(repository: str, name: str, revision: str | None, give: str) -> Path:
    """A file of a dataset of the hub, from its cache, else downloaded. give: as of `official_file`.

    Raises UserError if it can be had from neither.
    """
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    if (cached := cached_file(repository, name, revision)) is not None:
        return cached
    what = f"{repository}/{name}"
    ways_out = ways_out_of(give, "the hub's cache (a machine without a network can be given a copy of it)")
    require_network(constants.ENDPOINT, what, ways_out)
    try:
        return Path(hf_hub_download(repository, name, revision=revision, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"{what} could not be downloaded ({reason_of(error)}). {ways_out}") from error


def official_cache(owner: str) -> Path:
    """The folder of a suite's downloaded files."""
    return cache_folder() / owner.lower().replace(" ", "_")


def ways_out_of(give: str, folder: str) -> str:
    """The remedy in messages about missing files."""
    return f"Either give data.dir=FOLDER with {give}, or run once with a network, which fills {folder}"


def require_network(url: str, what: str, ways_out: str) -> None:
    """Raise UserError if HF_HUB_OFFLINE is set or the server does not answer. what: the file in the message."""
    if is_offline():
        raise UserError(
            f"{what} is not cached yet and no network is used (by plan and doctor, or with HF_HUB_OFFLINE). {ways_out}"
        )
    if not is_reachable(url):
        raise UserError(f"{what} is not cached yet and {url} does not answer. {ways_out}")


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def is_reachable(url: str, timeout_s: float = 3.0) -> bool:
    """Whether a web server answers within `timeout_s` seconds, even with an error page.

    For use before a download: the hub's client tries for 23 seconds to find a host that does not exist. The request
    runs in a thread, as looking up a name has no time limit.
    """
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s).close()
        except urllib.error.HTTPError:
            pass  # an error page is an answer
        except (OSError, ValueError, http.client.HTTPException):
            return
        answered.set()

    thread = threading.Thread(target=ask, name="is_reachable", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answered.is_set()
