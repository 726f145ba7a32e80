"""The cost of a run or a sweep before it starts: jobs, tokens, FLOPs, memory, hours.

    lazyllm-bench plan model=llama2 method=lazy dataset=hotpotqa --gpu a100
    lazyllm-bench plan experiment=table1 model=llama2,xgen --gpu h100
    lazyllm-bench plan experiment=demo             # this machine; hours need a stored run of the model in runs/

The arguments are those of a run or a sweep. Nothing is downloaded and no model runs. Prompts are counted exactly if the
data and the tokenizer are in the caches, else estimated from LongBench's published mean lengths. Answers have their
greatest length, or their mean length in stored runs of the model. Seconds follow from the device's data sheet at an
assumed utilisation, corrected by stored runs of the model on such a device. Decoding is counted without revivals.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eval.run.config import compose_config, to_run_config
from eval.run.cost import CPU, GPUS
from eval.run.resolved import resolve
from eval.run.targets import OutOfReachError
from lazyllm.errors import UserError

if TYPE_CHECKING:
    from eval.run.plan import Bill

log = logging.getLogger(__name__)

_HEADINGS = (
    "run", "examples", "prompt tokens", "longest", "answer tokens", "PFLOP", "of baseline", "TB read", "of baseline",
    "GB", "hours",
)  # fmt: skip


def bills(arguments: Sequence[str], gpu: str | None, runs: Path) -> list[Bill]:
    """The bill of each run of the arguments. gpu: a key of `GPUS`, None for this machine. Raises UserError.

    Runs that cannot reach their target speedup are left out, with a line in the log.
    """
    from eval.run.expect import jobs_of
    from eval.run.plan import bill, name_of

    whole = [argument for argument in arguments if not argument.startswith("shard=")]
    bills = []
    for job in jobs_of(whole):
        for run in resolve(to_run_config(compose_config(job))).runs.values():
            try:
                bills.append(bill(run, gpu, runs))
            except OutOfReachError as error:
                log.warning("left out: %s: %s", name_of(run), error)
    if not bills:
        raise UserError("no run reaches its speedup on this model: give a lower one")
    return bills


def as_text(bills: Sequence[Bill], gpu: str | None) -> str:
    """A Markdown table, and the assumptions below it."""
    from eval.analysis.table import markdown_lines  # not at the top: it imports pandas

    rows = [
        [
            bill.run, str(bill.examples), f"{bill.prompt_tokens:,}", f"{bill.longest:,}", f"{bill.answer_tokens:,}",
            f"{bill.petaflops:.4g}", f"{bill.baseline_petaflops:.4g}",
            f"{bill.read_terabytes:.4g}", f"{bill.baseline_read_terabytes:.4g}",
            f"{sum(bill.gigabytes.values()):.3g}", _hours(bill.hours),
        ]
        for bill in bills
    ]  # fmt: skip
    known = [bill.hours for bill in bills if bill.hours is not None]
    largest = max(bills, key=lambda bill: sum(bill.gigabytes.values()))
    parts = ", ".join(f"{part} {size:.3g}" for part, size in largest.gigabytes.items())
    lines = [
        *markdown_lines(_HEADINGS, rows, 1),
        "",
        f"{len(bills)} runs, {_hours(sum(known) if len(known) == len(bills) else None)} hours one after the other",
        f"most memory: {sum(largest.gigabytes.values()):.3g} GB ({parts}), {largest.run}",
        *_warnings(bills, largest, gpu),
    ]
    return "\n".join(lines)


def _warnings(bills: Sequence[Bill], largest: Bill, gpu: str | None) -> list[str]:
    device = GPUS[gpu] if gpu else CPU
    guessed = dict.fromkeys(why.partition(" (")[0] for bill in bills for why in bill.guessed)
    lines = [f"prompt lengths are estimates from LongBench's published means: {why}" for why in guessed]
    if any(bill.hours is None for bill in bills):
        lines.append("hours are unknown: run the model on this machine first (limit=1 is enough), or give --gpu")
    if gpu:
        rates = f"{device.prefill:.0%} of {device.flops_per_s / 1e12:.0f} TFLOP/s in prefill, {device.decode:.0%} of "
        rates += f"{device.bytes_per_s / 1e12:.3g} TB/s in decoding, at least {device.layer_s * 1e3:.1g} ms a layer"
        corrected = any(bill.corrected_by for bill in bills)
        lines.append(f"assumed rates of {device.name}: {rates}; {'' if corrected else 'not '}corrected by stored runs")
        if sum(largest.gigabytes.values()) > 0.95 * device.gigabytes:
            lines.append(
                f"does not fit into {device.gigabytes:.0f} GB: try model.quantise=int8, a smaller "
                "model.max_prompt_tokens, method.aux_device=cpu (lazy), or model.device_map=auto"
            )
    return lines


def _hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:.2g}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb `plan`. Returns the exit code. Raises UserError."""
    parser = argparse.ArgumentParser(
        prog="lazyllm-bench plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="*", metavar="KEY=VALUE", help="as of lazyllm-bench run")
    parser.add_argument("--gpu", choices=GPUS, help="default: this machine")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="stored runs; default: runs")
    parser.add_argument("-m", action="store_true", help="no effect: all jobs of a sweep are planned anyway")
    options = parser.parse_intermixed_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub's client is imported: planning downloads nothing
    print(as_text(bills(options.run, options.gpu, options.runs), options.gpu))
    return 0
