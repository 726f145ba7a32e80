"""Every measurement that the speed targets need, on this machine, by one command.

    python -m lazyllm.bench.measure_all results/reference/cpu --threads 1             # an hour and a half on one core
    python -m lazyllm.bench.measure_all results/reference/h100 --only steps xgen      # a part of it
    python -m scripts.bench_report results/reference/cpu                              # the table of targets

Each part is one call of `lazyllm-bench bench` and one JSON file. A part whose file exists is skipped: remove the file
to measure it again. The shapes are Llama 2 7B and XGen 7B on an accelerator, a Llama of 1B on a CPU.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from lazyllm.bench.__main__ import main as bench
from lazyllm.models.load import as_device

# Schedules of the paper's Table 1: eval/analysis/published/table1_parameters.csv
_TABLE_1 = {
    "single_doc_qa": '{"9": 0.7693, "19": 0.7693, "28": 0.7693}',
    "multi_doc_qa": '{"9": 0.3567, "19": 0.3567, "28": 0.3567}',
    "summarization": '{"9": 0.7162, "19": 0.7162, "28": 0.7162}',
    "few_shot": '{"9": 0.4084, "19": 0.4084, "28": 0.4084}',
    "code": '{"9": 0.5017, "19": 0.5017, "28": 0.5017}',
    "synthetic": '{"6": 0.3711, "16": 0.3711, "25": 0.3711}',
}


def _method(schedule: str) -> str:
    return f"--method '{schedule}'"


_STEPS = "--method paper --method paper@0.02 --method keep1 --against hf"
_TWO = """--method paper --method '{"2": 0.4, "6": 0.5}'"""

# Part -> arguments of `lazyllm-bench bench`
ON_CPU = {
    "steps": f"--shape llama-1b --tokens 2000 --new-tokens 33 {_STEPS} --repeats 3 --warmup 1",
    # more pairs, as whole generations one after the other are noisier than turns token by token
    "prefill": "--shape llama-1b --tokens 2000 --new-tokens 1 --method paper --against hf --repeats 12 --warmup 1",
    "transformers": "--shape llama-1b --tokens 2000 --new-tokens 9 --method keep1 --against hf --repeats 9 --warmup 1",
    "answers": f"--shape llama-1b --tokens 2000 --new-tokens 1 17 {_TWO} --repeats 3 --warmup 0",
    "long_answers": f"--shape llama-1b --tokens 2000 --new-tokens 129 512 {_TWO} --repeats 1 --warmup 0",
    "curve": "--shape llama-1b --tokens 1000 2000 4000 8000 --new-tokens 1 --method paper --repeats 2 --warmup 0",
    "long": "--shape llama-1b --tokens 16000 32000 --new-tokens 1 --method paper --repeats 0",
}

ON_AN_ACCELERATOR = {
    "steps": f"--shape llama2 --tokens 1000 2000 3500 7500 --new-tokens 64 {_STEPS}",
    "xgen": f"--shape xgen --tokens 1000 2000 3500 7500 --new-tokens 64 {_STEPS}",
    "table1": f"--shape llama2 --tokens 3500 --new-tokens 64 {' '.join(map(_method, _TABLE_1.values()))}",
    "answers": "--shape llama2 --tokens 3500 --new-tokens 1 17 129 512 --method paper "
    f"{_method(_TABLE_1['multi_doc_qa'])} --repeats 3",
    # tokens of LongBench's shortest, mean and longest prompt (89 rows of 16 datasets, Llama 2, truncated to 3,500)
    "longbench": "--shape llama2 --tokens 1315 3372 3506 --new-tokens 64 --method paper",
    "curve": "--shape llama2 --tokens 1000 2000 4000 8000 16000 32000 --new-tokens 1 --method paper --repeats 3",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m lazyllm.bench.measure_all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder of the JSON files")
    parser.add_argument("--only", nargs="+", help="measure these parts only")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads")
    options = parser.parse_args(arguments)
    parts = ON_CPU if as_device(options.device).type == "cpu" else ON_AN_ACCELERATOR
    unknown = sorted(set(options.only or ()) - set(parts))
    if unknown:
        sys.exit(f"error: --only {' '.join(unknown)}: give parts of {', '.join(parts)} (on this device)")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.only or parts:
        file = options.folder / f"{name}.json"
        if file.exists():
            print(f"{file} exists: skipped", file=sys.stderr)
            continue
        partial = file.with_suffix(".partial")  # a part that was stopped is measured again
        threads = ["--threads", str(options.threads)] if options.threads else []
        settings = ["--dtype", "bfloat16", "--device", options.device, *threads, "--json", str(partial)]
        bench([*shlex.split(parts[name]), *settings])
        partial.replace(file)


if __name__ == "__main__":
    main()
