"""Runs for tests: made as `python run.py ...` makes them, and a small one."""

from functools import cache
from pathlib import Path
from typing import Any

from eval.benchmarks.chat_format import ChatFormat
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.prompts import build_prompt
from eval.run import loop
from eval.run.answers import Visits
from eval.run.arms import Arm, MethodAsked
from eval.run.asked import Asked, ask
from eval.run.case import Case
from eval.run.config import check_arguments, compose_config, register_schema, to_run_config
from eval.run.decode import Bench
from eval.run.memory import Memory
from eval.run.run import prepare
from eval.run.settings import ModelConfig, RunConfig
from eval.store.runs import StoredRun

registered = cache(register_schema)  # takes as long as half a run's settings; who registers another restores this one


def run_of(*overrides: str) -> Asked:
    """The run that `python run.py OVERRIDES` asks for; what can be refused without files is."""
    registered()
    check_arguments(overrides)
    return ask(to_run_config(compose_config(overrides)))


def measure(asked: Asked, show: bool = True) -> StoredRun:
    """What `eval.run.loop.measure` returns of the run."""
    return loop.measure(prepare(asked), show)


def small_run(out: Path | str | None, **changes: Any) -> Asked:
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
    return ask(RunConfig(**(settings | changes)))


def case_of(dataset: str, tokenizer: Any, max_new_tokens: int) -> Case:
    """A dataset's first example, ready to be measured."""
    loaded = load_rows(DATASETS[dataset])
    prompt = build_prompt(loaded.examples[0], loaded.dataset, tokenizer)
    return Case(DATASETS[dataset], loaded.examples[0], prompt, max_new_tokens, (2,))


def bench_of(
    model: Any, tokenizer: Any, arms: Any, baseline: str | None = "baseline", chat: Any = None, **settings: Any
) -> Visits:
    """Visits of arms made by hand. settings: `fidelity`, `batch_size` of the run."""
    bench = Bench(model, Memory(model.device), settings.get("batch_size", 1), settings.get("fidelity") is not None)
    return Visits(bench, tokenizer, chat or ChatFormat(), tuple(arms), baseline)


def arm(label: str, **settings: Any) -> Arm:
    """An arm whose settings are the same for all datasets."""
    return Arm(label, settings, dict.fromkeys(DATASETS, MethodAsked.of(settings).make()))
