"""Show prompts, or write rows in a suite's official format: lazyllm-bench rows dataset=NAME [limit=N] [out=FOLDER] ...

Without out=FOLDER it prints the prompts of the first rows (one of each dataset without limit=N) and their gold answers.
With it, FOLDER/<dataset>.jsonl has the rows of each dataset, in the format of its suite. No weights are loaded. Keys
are those of lazyllm-bench run; a needle's rows depend on needle.*, model.tokenizer and model.chat.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from eval.benchmarks.rows import named
from eval.run.asked import ask, read_rows
from eval.run.cases import prompts_of
from eval.run.config import run_config
from eval.store.runs import counted
from lazyllm.errors import parser_of
from lazyllm.files import write_whole


def main(arguments: Sequence[str]) -> int:
    """Show the prompts, or write the rows, with a line for each dataset. Returns the exit code."""
    _, arguments = parser_of("rows", __doc__).parse_known_args(arguments)
    asked = ask(run_config(arguments))
    if asked.config.out is None:
        shown = asked if asked.config.limit is not None else asked.changed(limit=1)
        for case in prompts_of(shown):
            gold = " | ".join(case.example.answers)
            print(f"{case.dataset.name}, row {case.example.id}: {len(case.prompt.token_ids)} tokens; gold: {gold}")
            print(case.prompt.text, end="\n\n")
        return 0
    for data in read_rows(asked):
        lines = [json.dumps(example.official, default=named) for example in data.examples]
        file = Path(asked.config.out) / f"{data.dataset.name}.jsonl"
        write_whole(file, "".join(f"{line}\n" for line in lines))
        print(f"{file}: {counted(len(lines), 'row')}")
    return 0
