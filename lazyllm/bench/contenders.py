"""All methods at the same ideal speedups (`--field`): their settings on a shape, and the table of results."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lazyllm.bench.case_table import markdown, megabytes, spread
from lazyllm.bench.cases import BenchCase, Pair
from lazyllm.methods import METHODS, Baseline, Method, make
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def contenders(config: Any, n: int, speedups: Sequence[float], draft: str) -> dict[str, Method]:
    """Every method at each ideal TTFT speedup that its dial reaches on n prompt tokens; once if it has no dial."""
    found: dict[str, Method] = {}
    for name, kind in METHODS.items():
        settings = _settings(name, config.num_hidden_layers, draft)
        if kind is Baseline or kind.diagnostic:
            continue
        if kind.dial is None:
            found[name] = make(name, settings)
            continue
        for target in speedups:
            value = kind.solve(settings, config, n, target)
            if value is not None:
                found[f"{name} {target:g}x"] = make(name, settings | {kind.dial: value})
    return found


def _settings(name: str, num_layers: int, draft: str) -> dict[str, Any]:
    """Settings that a method needs beside its dial; all others are the authors' defaults."""
    needed: dict[str, dict[str, Any]] = {
        # on random weights ranks never settle: cut at the earliest layer
        "asl": {"threshold": 1e9},
        "prompt_compression": {"keep": 0.5, "unit": "token"},
        "specprefill": {"draft": draft},
        "static_pruning": {"layer": max(1, num_layers * 3 // 10)},
    }
    return needed.get(name, {})


@contextmanager
def random_draft(config: PreTrainedConfig, spec: ModelSpec) -> Iterator[str]:
    """The folder of a draft with random weights: a quarter of the model's layers, half as wide."""
    from lazyllm.models.load import random_weights

    halved = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes: dict[str, Any] = {name: max(1, getattr(config, name) // 2) for name in halved}
    sizes |= {"num_hidden_layers": max(1, config.num_hidden_layers // 4), "layer_types": None}
    own = type(config)(**(config.to_dict() | sizes))
    with TemporaryDirectory() as folder:
        random_weights(own, spec).save_pretrained(folder)
        yield folder


def table(cases: Sequence[BenchCase]) -> str:
    """Markdown: a row for each method, setting and prompt length."""
    return markdown(COLUMNS, cases)


def _spread(values: Sequence[float]) -> str:
    """The median, with quartiles if there are several values."""
    return f"{values[0]:.2f}" if len(values) == 1 else spread(values, 2)


def _peak(case: BenchCase) -> str:
    peak = case.untimed and case.untimed.prefill_peak_bytes
    return megabytes(peak) if peak is not None else "-"


COLUMNS = {
    "method": lambda case: case.name,
    "prompt": lambda case: f"{case.tokens:,}",
    "TTFT, s": lambda case: f"{statistics.median(pair.other.ttft_s for pair in case.pairs):.2f}",
    "TTFT speedup": lambda case: _spread(case.of_pairs(Pair.ttft_speedup)),
    "ideal": lambda case: f"{case.ideal_ttft_speedup:.2f}",
    "share of the ideal": lambda case: f"{case.share_of_ideal():.2f}",
    "selection, % of TTFT": lambda case: f"{100 * case.untimed.selection_share:.1f}",
    "step / baseline's": lambda case: _spread(case.of_pairs(Pair.step_ratio)),
    "step / baseline's with as many tokens stored": lambda case: _spread(case.of_pairs(Pair.equal_step_ratio)),
    "stored, % of the baseline's": lambda case: f"{100 * case.memory_ratio():.0f}",
    "peak beyond weights": _peak,
    "waits in prefill": lambda case: str(case.untimed.prefill_waits),
}
