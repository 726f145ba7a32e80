"""Whether this machine is ready: a line for each thing that a run may need, with the command that fixes it.

    lazyllm-bench doctor                 # for Llama 2 on LongBench
    lazyllm-bench doctor --model qwen3-8b

Nothing is downloaded, no model is loaded, and torch is not imported. `missing`: the run needs it and would not find it.
`not needed`: the run works without it. The exit code is 0 if nothing is missing, else 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from eval.run.finding import MISSING, Finding
from eval.run.hub_checks import (
    check_hub,
    check_model,
    check_rows,
    check_token,
    check_wandb,
    hub_answers,
    is_cached,
)
from eval.run.machine_checks import (
    check_disk,
    check_flash_attention,
    check_gpu,
    check_memory,
    check_python,
    check_scheduler,
    check_torch,
    find_gpu,
)  # fmt: skip
from lazyllm.engine.flops import LayerShape
from lazyllm.presets import PRESETS
from lazyllm.spec import source_of


def gigabytes(model: str) -> float:
    """Gigabytes of a preset's weights in 16 bits; 0 for other models, whose shapes are unknown here."""
    preset = PRESETS.get(model)
    if preset is None or preset.architecture is None:
        return 0
    shape, config = LayerShape.of(SimpleNamespace(**preset.architecture)), preset.architecture
    embeddings = config["vocab_size"] * shape.width * (1 if config.get("tie_word_embeddings") else 2)
    return 2 * (shape.linear_flops // 2 * config["num_hidden_layers"] + embeddings) / 1e9


def examine(model: str) -> list[Finding]:
    """Every finding, in order. Raises UserError for an unknown model."""
    source_of(model)
    gpu, reachable, cached, size = find_gpu(), hub_answers(), is_cached(model), gigabytes(model)
    checks: dict[str, Callable[[], Finding]] = {
        "Python": check_python,
        "torch": lambda: check_torch(gpu),
        "GPU": lambda: check_gpu(gpu, size),
        "memory": lambda: check_memory(gpu, size),
        "disk": lambda: check_disk(0 if cached else size),
        "hub": lambda: check_hub(reachable, needed=not cached or check_rows(model).state == MISSING),
        "token": lambda: check_token(model, cached),
        model: lambda: check_model(model, cached, reachable),
        "rows": lambda: check_rows(model),
        "FlashAttention": lambda: check_flash_attention(gpu),
        "scheduler": check_scheduler,
        "W&B": check_wandb,
    }
    return [_safely(thing, check) for thing, check in checks.items()]


def _safely(thing: str, check: Callable[[], Finding]) -> Finding:
    """The check's finding; if a broken machine makes the check fail, that is the finding."""
    try:
        return check()
    except Exception as error:
        return Finding(thing, MISSING, f"could not be examined ({type(error).__name__}: {error})")


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb `doctor`. Returns the exit code. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="lazyllm-bench doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama2", metavar="NAME", help="preset, folder or hub id; default: llama2")
    findings = examine(parser.parse_args(arguments).model)
    for finding in findings:
        print(f"{finding.thing:<15}{finding.state:<12}{finding.says}")
    return int(any(finding.state == MISSING for finding in findings))
