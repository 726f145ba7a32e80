"""Write rows in a suite's official format, without a model: lazyllm-bench rows dataset=NAME out=FOLDER [limit=N] ...

Writes FOLDER/<dataset>.jsonl for each dataset, in the format of its suite. Keys are those of lazyllm-bench run; RULER's
rows depend on ruler.length, ruler.seed, model.tokenizer and model.chat.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from eval.benchmarks.datasets import load
from eval.run.config import check_arguments, compose_config, register_schema, to_run_config
from eval.run.resolved import resolve
from eval.store.runs import counted
from lazyllm.errors import UserError
from lazyllm.files import write_whole


def main(arguments: Sequence[str]) -> int:
    """Write the rows of the datasets; prints a line for each. Returns the exit code. Raises UserError."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    register_schema()
    check_arguments(arguments)
    run = resolve(to_run_config(compose_config(arguments)))
    if run.config.out is None:
        raise UserError("rows need a folder: give out=FOLDER")
    for dataset in run.datasets:
        lines = [json.dumps(row.official) for row in load(dataset, run.data).examples[: run.data.limit]]
        file = Path(run.config.out) / f"{dataset.name}.jsonl"
        write_whole(file, "".join(f"{line}\n" for line in lines))
        print(f"{file}: {counted(len(lines), 'row')}")
    return 0
