"""Write rows in a suite's official format, without a model: lazyllm-bench rows dataset=NAME out=FOLDER [limit=N] ...

Writes FOLDER/<dataset>.jsonl for each dataset, in the format of its suite. Keys are those of lazyllm-bench run; RULER's
rows depend on ruler.length, ruler.seed, model.tokenizer and model.chat.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from eval.run.config import run_config
from eval.run.run import Run
from eval.store.runs import counted
from lazyllm.errors import UserError
from lazyllm.files import write_whole


def main(arguments: Sequence[str]) -> int:
    """Write the rows of the datasets; prints a line for each. Returns the exit code. Raises UserError."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    run = Run(run_config(arguments))
    if run.config.out is None:
        raise UserError("rows need a folder: give out=FOLDER")
    for name, examples in run.examples.items():
        lines = [json.dumps(example.official) for example in examples]
        file = Path(run.config.out) / f"{name}.jsonl"
        write_whole(file, "".join(f"{line}\n" for line in lines))
        print(f"{file}: {counted(len(lines), 'row')}")
    return 0
