"""Which runs and which traced example stand for LazyLLM where a figure shows one setting only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from eval.store.frame import StoredRun, label_of
from eval.store.trace import Trace, read_trace


def setting_of(run: StoredRun) -> str:
    return label_of(run.method, run.settings)


def shown_lazy(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Of each model the runs of one LazyLLM setting: Figure 4's schedule where it was run, else the most run one.

    Most run: with the most examples; of equals the first by its label.
    """
    lazy = [run for run in runs if run.method == "lazy"]
    chosen = []
    for model in dict.fromkeys(run.model for run in lazy):
        examples: Counter[str] = Counter()
        for run in lazy:
            if run.model == model:
                examples[setting_of(run)] += len(run.examples)
        setting = min(examples, key=lambda one: (one != setting_of_the_paper(), -examples[one], one))
        chosen += [run for run in lazy if run.model == model and setting_of(run) == setting]
    return chosen


def setting_of_the_paper() -> str:
    """Figure 4's schedule, nothing else changed."""
    return label_of("lazy", {"schedule": "paper", "prune_generated": False, "revive": True})


def traced_example(runs: Sequence[StoredRun]) -> tuple[StoredRun, Trace] | None:
    """The first trace of a run that has one; None where there is none.

    The paper's models come before others, and Figure 4's schedule before others.
    """
    traced = [run for run in runs if run.traces]
    if not traced:
        return None
    run = min(traced, key=lambda one: (one.paper_model is None, setting_of(one) != setting_of_the_paper()))
    return run, read_trace(run.traces[0])
