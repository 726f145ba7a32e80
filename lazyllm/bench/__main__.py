"""Time methods against the baseline, against transformers and against the FLOPs.

One process, random weights, a seeded random prompt. The baseline and a method take turns token by token, so a slow
spell of the machine slows both; both KV caches are in memory. transformers' own `generate` cannot take turns: it runs
a whole generation after the baseline's. Ratios are taken within such a pair; a table shows their median and quartiles.

    lazyllm-bench bench --shape llama-1b --threads 1 --tokens 2000 --new-tokens 33 --method paper --against hf
    lazyllm-bench bench --shape llama2 --tokens 1000 3500 --new-tokens 65 --method paper@0.02 --json out.json
    lazyllm-bench bench --shape layers=16,width=1024 --dtype float32 --method '{2: 0.4, 5: 0.5}'
    lazyllm-bench bench --field --threads 1 --tokens 2000 4000 --new-tokens 9 --repeats 2 --json field/field.json
    lazyllm-bench bench --turn 64 256 --threads 1 --tokens 2000 --repeats 5 --json turns/turns.json
    python -m lazyllm.bench.measure_all results/reference    # every measurement of the speed targets

A method is a schedule: `paper` (Figure 4's), `none`, `keep1` (Figure 4's layers, keep ratio 1), or
{layer: keep ratio, ...}. Random weights attend to all tokens alike, so LazyLLM revives in nearly every step.
SCHEDULE@SHARE times steps with and without revival: it selects by a random importance, and redraws it for that share of
the prompt's tokens in the first decoding step and in every eighth step after it.

--field times all methods of `lazyllm.methods`, each at the ideal speedups that it reaches. Beside each pair runs a
third generation: the baseline on as many tokens as the method stores.

--turn times a session's second turn of N tokens, after the prompt and one answer token: of the methods, of the baseline
and of transformers, which continues from its KV cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.bench.shapes import SHAPES, build, config_of, fields_of
from lazyllm.errors import UserError
from lazyllm.methods.support.schedule import Schedule, check_ratio
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from lazyllm.bench.cases import BenchCase
    from lazyllm.bench.turn_two import TurnCase
    from lazyllm.methods import Lazy, Method

HF = "hf"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. arguments: None takes those of the process."""
    options = _parser().parse_args(arguments)
    spec = ModelSpec(
        options.shape, "dummy", options.dtype, options.device, attn_implementation=options.attention, seed=options.seed
    )
    try:
        schedules = _checked(options, spec)
        import torch  # after the arguments are checked, as it takes seconds

        from lazyllm.models.load import as_device

        device = as_device(options.device)
    except (ValueError, TypeError) as error:
        sys.exit(f"error: {error}")
    if options.threads:
        torch.set_num_threads(options.threads)
    methods = {text: method_of(*schedule) for text, schedule in schedules.items()}
    longest = max(options.tokens) + max([*options.new_tokens, *(turn + 2 for turn in options.turn)])
    config = config_of(options.shape, longest)
    if options.turn:
        _measure_turns(options, build(config, spec), methods, device)
    elif options.field:
        from lazyllm.bench.contenders import contenders, random_draft, table

        with random_draft(config, spec) as draft:
            _measure(
                options, build(config, spec), lambda n: contenders(config, n, options.speedups, draft), table, device
            )
    else:
        from lazyllm.bench.case_table import table as case_table

        _measure(options, build(config, spec), lambda _: methods, case_table, device)


def _checked(options: argparse.Namespace, spec: ModelSpec) -> dict[str, tuple[Schedule, float | None]]:
    """{`--method`: its schedule and share}. Raises ValueError or TypeError for arguments that cannot be."""
    spec.check()
    if options.repeats == 0 and (options.against or options.new_tokens != [1]):
        raise UserError("--repeats 0 is one prefill of each method: give --new-tokens 1, leave out --against")
    if options.field and (options.method or options.against or options.repeats == 0):
        raise UserError("--field times pairs of all methods: leave out --method, --against and --repeats 0")
    if options.turn and (options.field or options.against or options.repeats == 0):
        raise UserError("--turn times rounds with transformers: leave out --field, --against and --repeats 0")
    layers = fields_of(options.shape)["num_hidden_layers"]
    return {text: schedule_of(text, layers) for text in options.method or ["paper"]}


def _measure(
    options: argparse.Namespace,
    model: PreTrainedModel,
    methods_for: Callable[[int], Mapping[str, Method]],
    table: Callable[[Sequence[BenchCase]], str],
    device: torch.device,
) -> None:
    """Measure and show every case. methods_for: prompt tokens -> the methods by name."""
    import torch

    from lazyllm.bench.clock import measure, untimed
    from lazyllm.methods import Baseline
    from lazyllm.models.load import device_name

    draw = torch.Generator().manual_seed(options.seed)
    cases: list[BenchCase] = []
    print(f"{options.shape}, {options.dtype}, on {device_name(device)}, {torch.get_num_threads()} CPU thread(s)")
    for tokens, new_tokens in product(options.tokens, options.new_tokens):
        prompt = torch.randint(0, model.config.vocab_size, (tokens,), generator=draw)
        contenders = {**methods_for(tokens), **({HF: None} if options.against == HF else {})}
        of_length: list[BenchCase] = []
        of_baseline, _ = untimed(model, Baseline(), prompt, new_tokens)
        for name, method in contenders.items():
            pairs = (options.repeats, options.warmup)
            of_length.append(measure(model, name, method, prompt, new_tokens, *pairs, of_baseline, options.field))
            print(f"measured {name}, {tokens} + {new_tokens} tokens", file=sys.stderr)
            _write(options, device, [*cases, *of_length])  # now, as a longer prompt may run out of memory
        cases += of_length
        print(f"\n{tokens} prompt tokens, {new_tokens} new; medians [quartiles] of {options.repeats} pairs")
        print(table(of_length), flush=True)


def _measure_turns(
    options: argparse.Namespace, model: PreTrainedModel, methods: Mapping[str, Method], device: torch.device
) -> None:
    import torch

    from lazyllm.bench.turn_two import measure_turns, table

    draw = torch.Generator().manual_seed(options.seed)
    cases: list[TurnCase] = []
    for tokens, turn in product(options.tokens, options.turn):
        text = torch.randint(0, model.config.vocab_size, (tokens + turn,), generator=draw)
        cases += measure_turns(model, methods, text[:tokens], text[tokens:], options.repeats, options.warmup)
        print(f"measured a turn of {turn} tokens behind {tokens}", file=sys.stderr)
        _write(options, device, cases)
    print(table(cases))


def _write(options: argparse.Namespace, device: torch.device, cases: Sequence[BenchCase] | Sequence[TurnCase]) -> None:
    if options.json:
        options.json.write_text(json.dumps({**about(options, device), "cases": list(map(asdict, cases))}) + "\n")


def schedule_of(text: str, num_layers: int) -> tuple[Schedule, float | None]:
    """The schedule of a `--method` argument, and the share behind its @. Raises ValueError or TypeError."""
    schedule, at, share = text.partition("@")
    try:
        drift = check_ratio("share", float(share)) if at else None
    except ValueError:
        raise UserError(f"--method {text}: expected SCHEDULE@SHARE with a share in (0, 1], e.g. paper@0.02") from None
    if schedule == "keep1":
        return Schedule(dict.fromkeys(Schedule.paper(num_layers).keep, 1.0)), drift
    return Schedule.parse(schedule, num_layers), drift


def method_of(schedule: Schedule, drift: float | None) -> Lazy:
    """LazyLLM with the schedule, with planned revivals if there is a drift (`SteeredLazy`)."""
    from lazyllm.bench.steered import SteeredLazy
    from lazyllm.methods import Lazy

    return Lazy(schedule) if drift is None else SteeredLazy(schedule, drift=drift)


def about(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Settings, machine, commit and versions of the measurement."""
    import torch
    import transformers

    from lazyllm.models.load import device_name

    return {
        "settings": {key: value for key, value in vars(options).items() if key != "json"},
        "device": device_name(device),
        "cpu": device_name(torch.device("cpu")),
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda,
        },
    }


def commit() -> str | None:
    """The commit of the sources, "-dirty" if they differ from it; None if git does not know them."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lazyllm-bench bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-1b", help=f"{', '.join(SHAPES)}, or sizes: layers=16,width=1024,...")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="sdpa", help="sdpa, eager or flash_attention_2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2000], help="prompt lengths")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[17], help="answer lengths")
    parser.add_argument("--method", action="append", help="a schedule, see above; may be repeated; default paper")
    parser.add_argument("--field", action="store_true", help="all methods, at the ideal speedups of --speedups")
    parser.add_argument("--turn", type=int, nargs="+", default=[], help="tokens of a second turn, which is measured")
    parser.add_argument("--speedups", type=float, nargs="+", default=[1.5, 2, 3], help="of --field")
    parser.add_argument("--against", choices=[HF], help="also time transformers' own model(...) and generate(...)")
    parser.add_argument("--repeats", type=int, default=7, help="timed pairs; 0: one prefill each, for long prompts")
    parser.add_argument("--warmup", type=int, default=2, help="pairs before the timed ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--json", type=Path, help="file for all samples, settings and versions")
    return parser


if __name__ == "__main__":
    main()
