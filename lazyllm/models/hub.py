"""Whether the network is there."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request


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
