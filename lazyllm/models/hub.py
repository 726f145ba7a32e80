"""One file of a repository on the Hugging Face hub, or one clear reason why not. Never runs a repository's code."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request
from pathlib import Path

from lazyllm.errors import UserError


def hub_file(hub_id: str, name: str, revision: str | None = None) -> Path | None:
    """The local path of a repository's file, from the hub's cache or the hub; None if the repository has no such file.

    Raises UserError: not a hub id, gated, not found, or not cached while there is no network.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        cached = try_to_load_from_cache(hub_id, name, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        if cached is not None:  # the cache remembers that the repository has no such file
            return None
        if is_offline():
            raise UserError(f"{hub_id}: {name} is not in the hub's cache, and HF_HUB_OFFLINE is set")
        if not is_reachable(constants.ENDPOINT):
            raise UserError(f"{hub_id}: {name} is not in the hub's cache, and {constants.ENDPOINT} does not answer")
        return Path(hf_hub_download(hub_id, name, revision=revision))
    except HFValidationError as error:
        raise UserError(f"{hub_id}: neither a folder nor a hub id ({error})") from error
    except GatedRepoError as error:
        raise UserError(
            f"{hub_id} is gated: ask for access at https://huggingface.co/{hub_id}, then log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"{hub_id} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{hub_id}: no such repository on the hub, or it is private and you are not logged in (`hf auth login`)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise UserError(f"{hub_id}: {name} could not be downloaded ({error})") from error
    except EntryNotFoundError:
        return None


def is_offline() -> bool:
    """Whether the user told the hub's client, by HF_HUB_OFFLINE=1, not to use the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def is_reachable(url: str, timeout_s: float = 3.0) -> bool:
    """Whether a web server answers at all (whatever it answers) within `timeout_s` seconds, proxies respected.

    Asked before a download: the hub's client tries for 23 seconds to find a host that does not exist. The question runs
    in a thread of its own because looking up a name knows no time limit.
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
