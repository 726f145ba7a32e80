"""Datasets of the hub by the package `datasets`, with and without a network."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eval.benchmarks.disk_cache import is_offline, is_reachable
from eval.benchmarks.rows import canonical
from lazyllm.errors import UserError, reason_of


def is_cached(repository: str) -> bool:
    """Whether a dataset of the hub is in the cache of the package `datasets`, without its slow import."""
    from huggingface_hub import constants

    folder = os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets"
    return (Path(folder).expanduser() / repository.replace("/", "___")).is_dir()


@cache
def hub_is_reachable() -> bool:
    """Whether the hub answers; False if HF_HUB_OFFLINE is set. Asked once a process, as it may take seconds."""
    from huggingface_hub import constants

    return not is_offline() and is_reachable(constants.ENDPOINT)


def load_from_hub(repository: str, configuration: str | None, split: str, other_way: str) -> Any:
    """The rows of a dataset's split, from the cache of `datasets` or from the hub.

    other_way: what else the user can do, after "give". Raises UserError if it is in neither.
    """
    from datasets import config, load_dataset
    from datasets.exceptions import DatasetsError

    offline = config.HF_HUB_OFFLINE
    try:
        # without a network, `datasets` tries for half a minute before it reads its cache
        config.HF_HUB_OFFLINE = offline or not hub_is_reachable()
        return load_dataset(repository, configuration, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise UserError(
            f"{repository} is not cached and cannot be downloaded ({reason_of(error)}): give {other_way}, or "
            "run once with a network"
        ) from error
    finally:
        config.HF_HUB_OFFLINE = offline


def rows_from_hub(
    repository: str, configuration: str | None, split: str, other_way: str
) -> tuple[list[tuple[str, dict[str, Any]]], str, str]:
    """(place, row) of each row of a dataset's split; their source, and their hash. Arguments as in `load_from_hub`."""
    rows = [dict(row) for row in load_from_hub(repository, configuration, split, other_way)]
    source = repository if configuration is None else f"{repository}, {configuration}"
    sha256 = hashlib.sha256(b"\n".join(map(canonical, rows))).hexdigest()
    return [(f"{source}, row {number}", row) for number, row in enumerate(rows, 1)], source, sha256


def missing_from_hub(repository: str, other_way: str) -> str | None:
    """Why a dataset cannot be loaded, without importing `datasets`; None if it can.

    other_way: what else the user can do, after "give".
    """
    if find_spec("datasets") is None:
        return f"the package datasets is missing: install it, or give {other_way}"
    if is_cached(repository) or hub_is_reachable():
        return None
    return f"{repository} is not cached and cannot be downloaded: give {other_way}, or run once with a network"
