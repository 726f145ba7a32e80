"""All that the targets ask for, measured on this machine by one command.

    python -m lazyllm.bench.measure_all results/reference/cpu --threads 1             # an hour and a half on one core
    python -m lazyllm.bench.measure_all results/reference/h100 --only steps xgen      # a part of it
    python -m lazyllm.bench.targets results/reference/cpu                           # the table of targets

Each part is one call of `python -m lazyllm.bench` and one JSON file. A part whose file lies there already is left
alone: remove the file to have it measured again. On an accelerator the shapes are Llama 2 7B's and XGen 7B's, else a 1B
Llama's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lazyllm.bench.__main__ import main as bench
from lazyllm.models.load import as_device

# Keep ratios that make three boundaries reach the paper's Table 1: eval/paper/published/table1_parameters.csv
_OF_TABLE_1 = {task: json.dumps(dict.fromkeys(("9", "19", "28"), ratio)) for task, ratio in {
    "single_doc_qa": 0.7693, "multi_doc_qa": 0.3567, "summarization": 0.7162, "few_shot": 0.4084, "code": 0.5017,
}.items()}  # fmt: skip
_OF_TABLE_1["synthetic"] = json.dumps(dict.fromkeys(("6", "16", "25"), 0.3711))
# The shortest, mean and longest of LongBench's prompts with Llama 2's tokenizer, cut to 3,500 (89 rows, 16 datasets)
_LONGBENCH = (1315, 3372, 3506)


def _methods(*methods: str) -> list[str]:
    return [part for method in methods for part in ("--method", method)]


_STEPS = [*_methods("paper", "paper@0.02", "keep1"), "--against", "hf"]

ON_CPU: Mapping[str, Sequence[str]] = {
    "steps": ["--shape", "llama-1b", "--tokens", "2000", "--new-tokens", "33", *_STEPS, "--repeats", "3",
              "--warmup", "1"],
    # what does not take turns token by token needs more pairs to see through the machine's ups and downs
    "prefill": ["--shape", "llama-1b", "--tokens", "2000", "--new-tokens", "1", *_methods("paper"), "--against", "hf",
                "--repeats", "12", "--warmup", "1"],
    "transformers": ["--shape", "llama-1b", "--tokens", "2000", "--new-tokens", "9", *_methods("keep1"), "--against",
                     "hf", "--repeats", "9", "--warmup", "1"],
    "answers": ["--shape", "llama-1b", "--tokens", "2000", "--new-tokens", "1", "17",
                *_methods("paper", '{"2": 0.4, "6": 0.5}'), "--repeats", "3", "--warmup", "0"],
    "long_answers": ["--shape", "llama-1b", "--tokens", "2000", "--new-tokens", "129", "512",
                     *_methods("paper", '{"2": 0.4, "6": 0.5}'), "--repeats", "1", "--warmup", "0"],
    "curve": ["--shape", "llama-1b", "--tokens", "1000", "2000", "4000", "8000", "--new-tokens", "1",
              *_methods("paper"), "--repeats", "2", "--warmup", "0"],
    "long": ["--shape", "llama-1b", "--tokens", "16000", "32000", "--new-tokens", "1", *_methods("paper"),
             "--repeats", "0"],
}  # fmt: skip

ON_AN_ACCELERATOR: Mapping[str, Sequence[str]] = {
    "steps": ["--shape", "llama2-7b", "--tokens", "1000", "2000", "3500", "7500", "--new-tokens", "64", *_STEPS],
    "xgen": ["--shape", "xgen-7b", "--tokens", "1000", "2000", "3500", "7500", "--new-tokens", "64", *_STEPS],
    "table1": ["--shape", "llama2-7b", "--tokens", "3500", "--new-tokens", "64", *_methods(*_OF_TABLE_1.values())],
    "answers": ["--shape", "llama2-7b", "--tokens", "3500", "--new-tokens", "1", "17", "129", "512",
                *_methods("paper", _OF_TABLE_1["multi_doc_qa"]), "--repeats", "3"],
    "longbench": ["--shape", "llama2-7b", "--tokens", *map(str, _LONGBENCH), "--new-tokens", "64",
                  *_methods("paper")],
    "curve": ["--shape", "llama2-7b", "--tokens", "1000", "2000", "4000", "8000", "16000", "32000",
              "--new-tokens", "1", *_methods("paper"), "--repeats", "3"],
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    parts = ON_CPU if as_device(options.device).type == "cpu" else ON_AN_ACCELERATOR
    unknown = sorted(set(options.only or ()) - set(parts))
    if unknown:
        sys.exit(f"error: --only is of {', '.join(parts)} on this device, got {', '.join(unknown)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.only or parts:
        file = options.folder / f"{name}.json"
        if file.exists():
            print(f"{file} is there already", file=sys.stderr)
            continue
        partial = file.with_suffix(".partial")  # a part that is stopped is not taken for a whole one
        threads = ["--threads", str(options.threads)] if options.threads else []
        bench([*parts[name], "--dtype", "bfloat16", "--device", options.device, *threads, "--json", str(partial)])
        partial.replace(file)


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m lazyllm.bench.measure_all",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where the JSON files go")
    parser.add_argument("--only", nargs="+", help="names of parts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads")
    return parser


if __name__ == "__main__":
    main()
