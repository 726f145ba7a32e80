"""How fast, against the model itself and against the arithmetic: `python -m lazyllm.bench`.

One process, random weights, seeded random prompts; the baseline and each method run in alternation on the same prompt,
and each method's speedup is the median over repetitions of (baseline's time / method's time) of neighbouring runs.

    python -m lazyllm.bench --layers 16 --width 1024 --tokens 2000 --schedule paper --schedule '{"2": 0.4, "5": 0.5}'
    python -m lazyllm.bench --model llama2 --dtype bfloat16 --device cuda --tokens 3500 --schedule paper --json out.json

Needs torch and transformers only.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, PreTrainedModel

from lazyllm.decoder import check_same_as_model
from lazyllm.generation import Generation, generate
from lazyllm.methods import Baseline, Lazy, Method
from lazyllm.models import as_device, as_dtype, device_name, load_weights, random_weights
from lazyllm.schedule import Schedule


@dataclass(frozen=True)
class Case:
    """A method on prompts of one length. Speedups are medians with quartiles; `share_of_ideal` is TTFT's."""

    method: str
    tokens: int
    new_tokens: int
    ideal_ttft_speedup: float
    ttft_speedup: tuple[float, float, float]
    share_of_ideal: float
    decode_step_speedup: tuple[float, float, float] | None
    total_speedup: tuple[float, float, float]
    baseline_ttft_s: list[float]
    method_ttft_s: list[float]
    baseline_total_s: list[float]
    method_total_s: list[float]
    pct_prompt_tokens_computed: float
    kv_bytes: int
    aux_bytes: int
    baseline_kv_bytes: int


def measure(
    model: PreTrainedModel,
    name: str,
    method: Method,
    tokens: int,
    new_tokens: int,
    repeats: int,
    warmup: int,
    seed: int,
) -> Case:
    """Alternate the baseline and the method on seeded random prompts of `tokens` tokens."""
    draw = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, model.config.vocab_size, (tokens,), generator=draw)
    runs: dict[str, list[Generation]] = {"baseline": [], "method": []}
    for repeat in range(warmup + repeats):
        pair = [("baseline", Baseline()), ("method", method)]
        for key, one in pair if repeat % 2 == 0 else reversed(pair):
            out = generate(model, prompt, one, new_tokens, eos_token_ids=())
            if repeat >= warmup:
                runs[key].append(out)
    baseline, ours = runs["baseline"], runs["method"]
    ttft = _quartiles([b.ttft_s / m.ttft_s for b, m in zip(baseline, ours, strict=True)])
    ideal = method.ideal_speedup(model.config, tokens)
    steps = None
    if new_tokens > 1:
        pairs = zip(baseline, ours, strict=True)
        steps = _quartiles([statistics.median(b.decode_step_s) / statistics.median(m.decode_step_s) for b, m in pairs])
    return Case(
        method=name,
        tokens=tokens,
        new_tokens=new_tokens,
        ideal_ttft_speedup=ideal,
        ttft_speedup=ttft,
        share_of_ideal=ttft[1] / ideal,
        decode_step_speedup=steps,
        total_speedup=_quartiles([b.total_s / m.total_s for b, m in zip(baseline, ours, strict=True)]),
        baseline_ttft_s=[out.ttft_s for out in baseline],
        method_ttft_s=[out.ttft_s for out in ours],
        baseline_total_s=[out.total_s for out in baseline],
        method_total_s=[out.total_s for out in ours],
        pct_prompt_tokens_computed=ours[-1].pct_prompt_tokens_computed,
        kv_bytes=ours[-1].kv_bytes,
        aux_bytes=ours[-1].aux_bytes,
        baseline_kv_bytes=baseline[-1].kv_bytes,
    )


def random_llama(options: argparse.Namespace) -> PreTrainedModel:
    """A Llama of the given size with seeded random weights."""
    config = LlamaConfig(
        hidden_size=options.width,
        intermediate_size=options.mlp_width or -(-options.width * 8 // 3 // 64) * 64,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads or max(1, options.width // 64),
        num_key_value_heads=options.kv_heads or options.heads or max(1, options.width // 64),
        vocab_size=options.vocab,
        max_position_embeddings=max(options.tokens) + options.new_tokens,
    )
    model = random_weights(config, as_dtype(options.dtype), as_device(options.device), "sdpa", options.seed)
    model.eval()
    check_same_as_model(model)
    return model


def table(cases: Sequence[Case]) -> str:
    """The cases as text: median [quartiles]."""
    heading = (
        "method",
        "tokens",
        "new",
        "ideal TTFT",
        "TTFT speedup",
        "of ideal",
        "step speedup",
        "total speedup",
        "KV+Aux",
    )
    rows: list[tuple[str, ...]] = [heading]
    for case in cases:
        memory = (case.kv_bytes + case.aux_bytes) / case.baseline_kv_bytes
        rows.append(
            (
                case.method,
                str(case.tokens),
                str(case.new_tokens),
                f"{case.ideal_ttft_speedup:.3f}",
                _shown(case.ttft_speedup),
                f"{case.share_of_ideal:.3f}",
                _shown(case.decode_step_speedup),
                _shown(case.total_speedup),
                f"{memory:.2f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heading))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lazyllm.bench", description="Time methods against the baseline.")
    parser.add_argument(
        "--model", help="preset, folder or hub id, with random weights; else a Llama of the sizes below"
    )
    for name, default in (("layers", 16), ("width", 1024), ("vocab", 32000), ("heads", None), ("kv-heads", None)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mlp-width", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000], help="prompt lengths")
    parser.add_argument("--new-tokens", type=int, default=1)
    parser.add_argument("--schedule", action="append", help="paper, none or JSON {layer: keep ratio}; may be repeated")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="where to write all samples and what they were measured on")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.model:
        model = load_weights(options.model, "dummy", options.dtype, options.device, seed=options.seed)
    else:
        model = random_llama(options)
    cases = []
    for text in options.schedule or ["paper"]:
        schedule = Schedule.parse(json.loads(text) if text.startswith("{") else text, model.config.num_hidden_layers)
        for tokens in options.tokens:
            case = measure(
                model, f"lazy {dict(schedule.keep)}", Lazy(schedule), tokens, options.new_tokens,
                options.repeats, options.warmup, options.seed,
            )  # fmt: skip
            cases.append(case)
            print(f"measured {case.method}, {tokens} tokens", file=sys.stderr)
    print(table(cases))
    if options.json:
        options.json.write_text(
            json.dumps({"cases": [asdict(case) for case in cases], **_about(model, options)}, indent=1) + "\n"
        )


def _about(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, Any]:
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    return {
        "settings": settings,
        "device": device_name(model.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(first quartile, median, third quartile)."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _shown(quartiles: tuple[float, float, float] | None) -> str:
    return "-" if quartiles is None else f"{quartiles[1]:.3f} [{quartiles[0]:.3f}, {quartiles[2]:.3f}]"


if __name__ == "__main__":
    main()
