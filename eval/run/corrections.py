"""Corrections of assumed rates and of answer lengths, from the stored runs of a model on a device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.run.cost import Device, work
from eval.run.resolved import build_method
from eval.store.runs import StoredRun, stored_runs
from lazyllm.methods import Baseline
from lazyllm.spec import ModelSpec


@dataclass(frozen=True)
class Corrections:
    """seconds: measured over assumed, by (method, "ttft" or "step" for a decoding step).

    answers: mean answer tokens by (method, dataset). runs: number of runs read.
    """

    seconds: Mapping[tuple[str, str], float]
    answers: Mapping[tuple[str, str], float]
    runs: int

    def of(self, method: str, kind: str) -> float:
        """The method's factor; the baseline's if the method has not run; 1 if neither has."""
        return self.seconds.get((method, kind), self.seconds.get(("baseline", kind), 1.0))


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
    for run, name, prefix in _sides(runs):
        for row in run.examples.to_dict("records"):
            tokens = int(row[f"{prefix}generated_tokens"])
            generated.setdefault((name, row["dataset"]), []).append(tokens)
            if row["turn"] > 1:  # rates are those of first turns
                continue
            method = _method_of(run, row["dataset"]) if name != "baseline" else Baseline()
            assumed = work(config, spec, method, int(row["prompt_tokens"]), tokens, weights)
            seconds.setdefault((name, "ttft"), []).append((row[f"{prefix}ttft_s"], assumed.ttft_s(device)))
            if tokens > 1:
                seconds.setdefault((name, "step"), []).append((row[f"{prefix}step_s"], assumed.step_s(device)))
    return Corrections(
        {key: sum(a for a, _ in pairs) / sum(b for _, b in pairs) for key, pairs in seconds.items()},
        {key: sum(counts) / len(counts) for key, counts in generated.items()},
        len(runs),
    )


def _sides(runs: Iterable[StoredRun]) -> Iterator[tuple[StoredRun, str, str]]:
    """(run, method, prefix of its columns) of each run's method, and of its paired baseline."""
    for run in runs:
        yield run, run.method, ""
        if run.method != "baseline" and run.identity["paired"]:
            yield run, "baseline", "baseline_"


def _method_of(run: StoredRun, dataset: str) -> Any:
    return build_method((run.identity["parameters"] or {}).get(dataset) or run.identity["method"])
