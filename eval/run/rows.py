"""Show prompts, or write rows in a suite's official format: lazyllm-bench rows dataset=NAME
[limit=N] [out=FOLDER] ...

Without out=FOLDER it prints the prompts of the first rows (one of each dataset without limit=N) and
their gold answers. With it, FOLDER/<dataset>.jsonl has the rows of each dataset, in the format of
its suite. No weights are loaded. Keys are those of lazyllm-bench run; a needle's rows depend on
needle.*, model.tokenizer and model.chat.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from eval.benchmarks.rows import named
from eval.compose import read
from eval.run.check import choose_data, read_rows
from eval.store.runs import counted
from lazyllm.errors import parser_of
from lazyllm.files import write_whole


def main(arguments: Sequence[str]) -> int:
    """Show the prompts, or write the rows, with a line for each dataset. Returns the exit code."""
    _, arguments = parser_of("rows", __doc__).parse_known_args(arguments)
    config = read(arguments)
    datasets, data = choose_data(config)
    if config.out is None:
        # not at the top: imports torch, once the arguments are checked
        from eval.run.prepare import prompts_of

        limit = config.limit or 1
        for prompt in prompts_of(config.model_copy(update={"limit": limit})):
            gold = " | ".join(prompt.example.answers)
            print(
                f"{prompt.dataset.name}, row {prompt.example.id}: {len(prompt.token_ids)} tokens; "
                f"gold: {gold}"
            )
            print(prompt.text, end="\n\n")
        return 0
    for loaded in read_rows(config, datasets, data):
        lines = [json.dumps(example.official, default=named) for example in loaded.examples]
        file = Path(config.out) / f"{loaded.dataset.name}.jsonl"
        write_whole(file, "".join(f"{line}\n" for line in lines))
        print(f"{file}: {counted(len(lines), 'row')}")
    return 0
