"""Runs for tests: made as `python run.py ...` makes them, and a small one."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eval.benchmarks.chat_format import ChatFormat
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.prompts import build_prompt
from eval.run.arms import Arm
from eval.run.cases import Case
from eval.run.config import check_arguments, compose_config, register_schema, to_run_config
from eval.run.measure import Bench
from eval.run.run import Run
from eval.run.settings import ModelConfig, RunConfig

registered = cache(register_schema)  # takes as long as half a run's settings; who registers another restores this one


def run_of(*overrides: str) -> Run:
    """The run of `python run.py OVERRIDES`; what can be refused without files and servers is."""
    registered()
    check_arguments(overrides)
    return settled(Run(to_run_config(compose_config(overrides))))


def settled(run: Run) -> Run:
    """The run, once its settings have been looked at."""
    _ = run.spec, run.chat, run.asked, run.datasets
    return run


def small_run(out: Path | str | None, **changes: Any) -> Run:
    """A quick run: three examples of each of two datasets, short prompts and answers, a method and the baseline."""
    settings: dict[str, Any] = dict(
        model=ModelConfig(name="tiny", dtype="float32", device="cpu", max_prompt_tokens=96),
        method={"name": "lazy", "schedule": {2: 0.5}},
        dataset={"lookup": True, "shots": True},
        warmup=0,
        limit=3,
        max_new_tokens=2,
        threads=1,
        out=None if out is None else str(out),
    )
    return settled(Run(RunConfig(**(settings | changes))))


def case_of(dataset: str, tokenizer: Any, max_new_tokens: int) -> Case:
    """A dataset's first example, ready to be measured."""
    loaded = load_rows(DATASETS[dataset])
    prompt = build_prompt(loaded.examples[0], loaded.dataset, tokenizer)
    return Case(DATASETS[dataset], loaded.examples[0], prompt, max_new_tokens, (2,))


def bench_of(
    model: Any, tokenizer: Any, arms: Any, baseline: str | None = "baseline", chat: Any = None, **settings: Any
) -> Bench:
    """A bench for arms made by hand. settings: `fidelity`, `evidence`, `batch_size` of the run."""
    config = SimpleNamespace(**{"fidelity": None, "evidence": True, "batch_size": 1} | settings)
    run: Any = SimpleNamespace(tokenizer=tokenizer, arms=arms, baseline=baseline, chat=chat or ChatFormat())
    run.config, run.batch_size = config, config.batch_size
    return Bench(run, model)


def arm(label: str, **settings: Any) -> Arm:
    """An arm whose settings are the same for all datasets."""
    return Arm(label, settings, dict.fromkeys(DATASETS, settings))
