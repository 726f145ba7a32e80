"""Corrections of assumed rates and of answer lengths, from the stored runs of a model on a device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.run.config import build_method
from eval.run.cost import Device, work
from eval.store.results import StoredRun, stored_runs
from lazyllm.methods import Baseline
from lazyllm.models.spec import ModelSpec


@dataclass(frozen=True)
class Corrections:
    """Measured over assumed seconds by method: of the first token, and of a decoding step.

    answers: mean answer tokens by (method, dataset). runs: number of runs read.
    """

    ttft: Mapping[str, float] = field(default_factory=dict)
    step: Mapping[str, float] = field(default_factory=dict)
    answers: Mapping[tuple[str, str], float] = field(default_factory=dict)
    runs: int = 0

    def of(self, factors: Mapping[str, float], method: str) -> float:
        """The method's factor; the baseline's if the method has not run; 1 if neither has."""
        return factors.get(method, factors.get("baseline", 1.0))


def read_corrections(
    folder: Path, model: dict[str, Any], device_name: str, device: Device, config: Any, spec: ModelSpec, weights: int
) -> Corrections:
    """Corrections from a folder's runs of a model on a device. Raises UserError.

    model: parts of the runs' identity. device_name: a part of the driver's device name. config, spec, weights: the
    model's, as in `work`.
    """
    named = re.compile(rf"\b{re.escape(device_name)}\b", re.IGNORECASE)
    runs = [
        run
        for run in (stored_runs([folder]) if folder.is_dir() else [])
        if model.items() <= run.identity.items() and named.search(run.identity["device"]) and len(run.examples)
    ]
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    generated: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for name, row in _measured(run):
            generated.setdefault((name, row["dataset"]), []).append(row["generated"])
            if row["turn"] > 1:  # rates are those of first turns
                continue
            method = _method_of(run, row["dataset"]) if name != "baseline" else Baseline()
            assumed = work(config, spec, method, int(row["n"]), int(row["generated"]), weights)
            seconds.setdefault((name, "ttft"), []).append((row["ttft_s"], assumed.ttft_s(device)))
            if row["generated"] > 1:
                seconds.setdefault((name, "step"), []).append((row["step_s"], assumed.step_s(device)))
    ratio = {key: sum(a for a, _ in pairs) / sum(b for _, b in pairs) for key, pairs in seconds.items()}
    return Corrections(
        {name: value for (name, kind), value in ratio.items() if kind == "ttft"},
        {name: value for (name, kind), value in ratio.items() if kind == "step"},
        {key: sum(counts) / len(counts) for key, counts in generated.items()},
        len(runs),
    )


def _measured(run: StoredRun) -> Iterable[tuple[str, dict[str, Any]]]:
    """(method, its measurements) of each turn, the paired baselines included."""
    sides = [("", run.method)]
    if run.method != "baseline" and run.identity["paired"]:
        sides.append(("baseline_", "baseline"))
    for _, row in run.examples.iterrows():
        for prefix, name in sides:
            yield (
                name,
                {
                    "dataset": row["dataset"],
                    "turn": row["turn"],
                    "n": row["prompt_tokens"],
                    "ttft_s": row[f"{prefix}ttft_s"],
                    "step_s": row[f"{prefix}step_s"],
                    "generated": row[f"{prefix}generated_tokens"],
                },
            )


def _method_of(run: StoredRun, dataset: str) -> Any:
    return build_method((run.identity["parameters"] or {}).get(dataset) or run.identity["method"])
