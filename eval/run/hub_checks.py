"""Checks of the caches and the hub: a token, a checkpoint, LongBench; and of W&B's key."""

from __future__ import annotations

import netrc
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from eval.benchmarks.datasets import default_suite
from eval.benchmarks.downloads import is_offline, is_reachable
from eval.run.finding import MISSING, NOT_NEEDED, OK, Finding
from lazyllm.presets import PRESETS
from lazyllm.spec import source_of

NETWORK_S = 0.8  # seconds to wait for the hub's answer


def hub_answers() -> bool:
    """Whether the hub answers in time; False if HF_HUB_OFFLINE is set."""
    return not is_offline() and is_reachable(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), NETWORK_S)


def check_hub(reachable: bool, needed: bool) -> Finding:
    """needed: whether something is missing in the caches."""
    if is_offline():
        return Finding("hub", NOT_NEEDED, "HF_HUB_OFFLINE is set: only the caches are read")
    if reachable:
        return Finding("hub", OK, "answers")
    command = "on a machine with a network, lazyllm-bench fetch model=... dataset=...; here, export HF_HUB_OFFLINE=1"
    return Finding("hub", MISSING if needed else NOT_NEEDED, f"does not answer: {command}")


def check_token(model: str, cached: bool) -> Finding:
    from huggingface_hub import get_token

    if get_token() is not None:
        return Finding("token", OK, "the hub's client has one")
    gated = model in PRESETS and PRESETS[model].gated  # the hub says it of other models: `check_model`
    return Finding("token", MISSING if gated and not cached else NOT_NEEDED, "hf auth login (gated models need it)")


def check_model(name: str, cached: bool, reachable: bool) -> Finding:
    source = source_of(name)
    if cached:
        return Finding(name, OK, f"{source} is here")
    if not reachable:
        return Finding(name, MISSING, f"{source} is not in the cache: lazyllm-bench fetch model={name}, with a network")
    return _in_time(
        lambda: _access(name, source), Finding(name, MISSING, f"the hub did not say whether {source} opens")
    )


def _access(name: str, source: str) -> Finding:
    from huggingface_hub import auth_check, errors

    try:
        auth_check(source)
    except errors.GatedRepoError:
        says = f"ask for access at https://huggingface.co/{source}, then hf auth login"
        return Finding(name, MISSING, f"{source} is gated: {says}")
    except errors.RepositoryNotFoundError:
        return Finding(name, MISSING, f"{source}: no such repository, or a private one: hf auth login")
    return Finding(name, OK, f"{source} can be downloaded: lazyllm-bench fetch model={name}")


def _in_time(ask: Callable[[], Finding], otherwise: Finding) -> Finding:
    """The finding of `ask` if it takes at most a few seconds; the hub's client tries for longer."""
    found: list[Finding] = []
    thread = threading.Thread(target=lambda: found.append(ask()), daemon=True)
    thread.start()
    thread.join(4 * NETWORK_S)
    return found[0] if found else otherwise


def is_cached(name: str) -> bool:
    """Whether a checkpoint is a folder, or its config and weights are in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    source = source_of(name)
    if Path(source).is_dir():
        return True
    files = ("model.safetensors.index.json", "model.safetensors")
    held = [isinstance(try_to_load_from_cache(source, file), str) for file in ("config.json", *files)]
    return held[0] and any(held[1:])


def check_rows(model: str) -> Finding:
    suite = default_suite(model)
    if suite.cached is None:
        return Finding("rows", NOT_NEEDED, f"{model} takes the suite {suite.name}, which makes its own")
    if suite.cached():
        return Finding("rows", OK, f"{suite.name} is in the cache")
    advice = f"lazyllm-bench fetch dataset={suite.whole}, or give data.dir=FOLDER"
    return Finding("rows", MISSING, f"{suite.name} is not in the cache: {advice}")


def check_wandb() -> Finding:
    hosts: Sequence[str] = ()
    with suppress(OSError, netrc.NetrcParseError):
        hosts = list(netrc.netrc(Path(os.environ.get("NETRC", "~/.netrc")).expanduser()).hosts)
    if os.environ.get("WANDB_API_KEY") or any("wandb" in host for host in hosts):
        return Finding("W&B", OK, "a key is configured: tracker=wandb is online")
    return Finding("W&B", NOT_NEEDED, "no key: tracker=wandb writes to the run's folder; wandb login adds one")
