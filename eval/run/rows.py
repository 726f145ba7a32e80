"""Show the prompts of a run: lazyllm-bench rows dataset=NAME [limit=N] ...

It prints the prompts of the first rows (one of each dataset without limit=N) and their gold
answers. No weights are loaded. Keys are those of lazyllm-bench run.
"""

from collections.abc import Sequence

from eval.compose import read
from eval.run.check import choose_data
from lazyllm.errors import parser_of


def main(arguments: Sequence[str]) -> int:
    """Show the prompts. Returns the exit code."""
    _, arguments = parser_of("rows", __doc__).parse_known_args(arguments)
    config = read(arguments)
    choose_data(config)
    from eval.run.prepare import prompts_of  # not at the top: imports torch, once all is checked

    for prompt in prompts_of(config.model_copy(update={"limit": config.limit or 1})):
        gold = " | ".join(prompt.example.answers)
        where = f"{prompt.dataset.name}, row {prompt.example.id}"
        print(f"{where}: {len(prompt.token_ids)} tokens; gold: {gold}")
        print(prompt.text, end="\n\n")
    return 0
