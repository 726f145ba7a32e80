"""Files of suites: in the user's folder, in the caches, and only then from the network."""

import hashlib
import logging
import os
import urllib.request
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

from lazyllm.errors import UserError, reason_of
from lazyllm.files import cache_folder, write_whole

log = logging.getLogger(__name__)
_warn_once = cache(log.warning)


def given_file(folder: Path, name: str, give: str) -> Path:
    """Find a file in the user's folder. Raises UserError if it is missing.

    give: the content that the folder must have.
    """
    file = folder.expanduser() / name
    if not file.is_file():
        raise UserError(f"data.dir={folder}: {name} is missing; give data.dir=FOLDER with {give}")
    return file


def cached_file(repository: str, name: str, revision: str | None = None) -> Path | None:
    """Find a file of a dataset in the hub's cache; None if it is not there.

    revision: a commit; None for the newest that is there.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    where: Any = {"revision": revision, "repo_type": "dataset", "local_files_only": True}
    try:
        return Path(hf_hub_download(repository, name, **where))
    except LocalEntryNotFoundError:
        return None


def hub_file(repository: str, name: str, revision: str | None, give: str) -> Path:
    """Find a file of a dataset in the hub's cache, or download it. Raises UserError.

    give: the files that may be in `data.dir` instead, for the message.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    if (file := cached_file(repository, name, revision)) is not None:
        return file
    what = f"{repository}/{name}"
    cache = "the hub's cache (a machine without a network can be given a copy of it)"
    _require_network(what, give, cache)
    try:
        return Path(hf_hub_download(repository, name, revision=revision, repo_type="dataset"))
    except (HfHubHTTPError, OSError) as error:
        lacks = f"{what} could not be downloaded ({reason_of(error)})"
        raise _refusal(lacks, give, cache) from error


def official_cache(owner: str) -> Path:
    """Return the folder of a suite's downloaded files."""
    return cache_folder() / owner.lower().replace(" ", "_")


def official_file(
    owner: str,
    name: str,
    url: str,
    sha256: str,
    folder: Path | None,
    give: str,
) -> bytes:
    """Read a file by a suite's authors: the user's copy, or one that is downloaded once.

    owner: the suite, for messages. name: the file's path in both folders.
    folder: the user's (`data.dir`), or None. give: the content that it must have.
    Raises UserError if the file is missing or cannot be downloaded, or if the downloaded one has
        another hash. If the user's has, the log says so once.
    """
    if folder is not None:
        file = given_file(folder, name, give)
        content = file.read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            differs = f"{file}: differs from {owner}'s own ({url})"
            _warn_once(f"{differs}, so scores are not comparable with published ones")
        return content
    file = official_cache(owner) / name
    if file.is_file() and hashlib.sha256(content := file.read_bytes()).hexdigest() == sha256:
        return content
    _require_network(f"{owner}'s {name}", give, str(file.parent))
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            content = answer.read()
    except (OSError, HTTPException) as error:
        lacks = f"{url} could not be downloaded ({reason_of(error)})"
        raise _refusal(lacks, give, str(file.parent)) from error
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        differs = f"{url}: not {owner}'s own (sha256 {found}, expected {sha256})"
        raise _refusal(differs, give, str(file.parent))
    write_whole(file, content)
    return content


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network, also if it was set after the hub's import."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def _require_network(what: str, give: str, cache: str) -> None:
    if is_offline():
        by_whom = "by plan and doctor, or with HF_HUB_OFFLINE"
        raise _refusal(f"{what} is not cached yet and no network is used ({by_whom})", give, cache)


def _refusal(what: str, give: str, cache: str) -> UserError:
    """The error about a file that is not there. cache: the folder that a download fills."""
    instead = f"run once with a network, which fills {cache}"
    return UserError(f"{what}. Either give data.dir=FOLDER with {give}, or {instead}")


@cache  # also of a failure, which may take half a minute
def find_split(repository: str, configuration: str | None, split: str) -> tuple[Any, str | None]:
    """Return a split of a dataset of the hub, or None and why it cannot be loaded.

    The package `datasets` knows which files a configuration and a split have. It looks into its
    cache first.
    """
    from datasets import config, load_dataset
    from datasets.exceptions import DatasetsError

    before, reason = config.HF_HUB_OFFLINE, ""
    try:
        for only_cache in dict.fromkeys((True, before or is_offline())):
            config.HF_HUB_OFFLINE = only_cache
            try:
                return load_dataset(repository, configuration, split=split), None
            except (OSError, ValueError, DatasetsError) as error:
                reason = reason_of(error)
    finally:
        config.HF_HUB_OFFLINE = before
    return None, f"{repository} is not cached and cannot be downloaded ({reason})"
