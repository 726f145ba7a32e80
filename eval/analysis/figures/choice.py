"""The choice of runs, or of one traced example, for figures that show a single setting."""

from __future__ import annotations

from collections import Counter

from eval.analysis.known_methods import STUDIED
from eval.store.record import Trace, read_trace
from eval.store.results import Results
from eval.store.runs import StoredRun, is_ablation, label_of

# Figure 4's schedule with all other settings at their defaults
PAPER_SETTING = label_of(STUDIED, {"schedule": "paper", "prune_generated": False, "revive": True})


def as_published(results: Results) -> Results:
    """The results without ablations of LazyLLM, which only tables show."""
    return results.where(lambda run: not is_ablation(run.settings))


def studied(results: Results) -> Results:
    """For each model, the runs of one LazyLLM setting: Figure 4's schedule if it was run, else the setting with most
    examples (the first by label of equal ones). Ablations are left out.
    """
    results = as_published(results)
    examples: dict[str, Counter[str]] = {}
    for run in results.runs:
        if run.method == STUDIED:
            examples.setdefault(run.model, Counter())[run.label] += len(run.examples)
    chosen = {
        model: min(counts, key=lambda label: (label != PAPER_SETTING, -counts[label], label))
        for model, counts in examples.items()
    }
    return results.where(lambda run: run.method == STUDIED and chosen[run.model] == run.label)


def traced_example(results: Results) -> tuple[StoredRun, Trace] | None:
    """The first trace of the runs, or None; the paper's models and Figure 4's schedule come first."""
    traced = [run for run in results.runs if run.traces]
    if not traced:
        return None
    run = min(traced, key=lambda run: (run.paper_model is None, run.label != PAPER_SETTING))
    return run, read_trace(run.traces[0])
