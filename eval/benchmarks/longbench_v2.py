"""LongBench v2 (arXiv 2412.15204): 503 multiple-choice questions on texts of 8,000 to 2 million words.

A folder (`data.dir=FOLDER`) holds the official `data.json` and `prompts/0shot.txt`. Without one, rows come from the
package `datasets` (`THUDM/LongBench-v2`), and the prompt from LongBench's repository, pinned by commit and sha256.
Prompt, truncation and scoring are those of `pred.py` (commit 2e00731), without chain of thought.

Ours: answers are greedy, officially sampled at temperature 0.1; an empty answer scores 0, officially it is left out of
the results.
"""

from functools import partial
from typing import Any

from eval.benchmarks.downloads import HubDataset, official_file
from eval.benchmarks.rows import FILLED, TEXT, check_fields, loaded, one_of
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite, register
from lazyllm.errors import UserError

ROWS, PROMPT = "data.json", "prompts/0shot.txt"
PROMPT_URL = f"https://raw.githubusercontent.com/THUDM/LongBench/2e00731f8d0bff23dc4325161044d0ed8af94c1e/{PROMPT}"
PROMPT_SHA256 = "68a162252bc9ff71d5d7abca3d69bb31aac3c35f832d657a2866f2018b8a6950"
MAX_NEW_TOKENS = 128
# A row's `length`: the group of these rows
LENGTHS = {"short": "short (0-32k words)", "medium": "medium (32-128k words)", "long": "long (128k-2M words)"}
_HUB = HubDataset("THUDM/LongBench-v2", f"LongBench v2's {ROWS} and {PROMPT}")
_PLACES = {"$Q$": "question", "$C_A$": "choice_A", "$C_B$": "choice_B", "$C_C$": "choice_C", "$C_D$": "choice_D"}
_LETTERS = ("A", "B", "C", "D")
_FIELDS = {"_id": FILLED, "domain": TEXT, "sub_domain": TEXT, "difficulty": one_of(("easy", "hard"))}
_FIELDS |= {"length": one_of(LENGTHS), **dict.fromkeys(_PLACES.values(), TEXT)}
_FIELDS |= {"answer": one_of(_LETTERS), "context": FILLED}


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The rows, from a folder or from `datasets`. Raises UserError as `longbench.load`."""
    content = official_file("LongBench v2", PROMPT, PROMPT_URL, PROMPT_SHA256, settings.dir, _HUB.give)
    try:
        template = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{PROMPT}: not UTF-8 text ({error})") from error
    absent = [place for place in ("$DOC$", *_PLACES) if place not in template]
    if absent:
        raise UserError(f"{PROMPT}: expected LongBench v2's prompt, with the place {absent[0]}")
    rows, parse = _HUB.rows(settings, ROWS), partial(_example, dataset, template)
    return loaded(dataset, rows, parse, settings.on_error, MAX_NEW_TOKENS, [template])


SUITE = register(
    Suite(
        name="longbench_v2",
        datasets=(
            Dataset("longbench_v2", "multiple_choice", "multiple_choice", suite="longbench_v2", decode_halves=False),
        ),
        load=load,
        check=_HUB.missing,
    )
)


def _example(dataset: Dataset, template: str, row: Any, number: int) -> Example:
    check_fields(row, _FIELDS)
    instruction, _, question = template.partition("$DOC$")
    parts = [instruction, row["context"].strip(), question]
    # one after the other in all of the prompt, as officially: texts may hold "$Q$"
    for place, field in _PLACES.items():
        parts = [part.replace(place, row[field].strip()) for part in parts]
    return Example(
        dataset=dataset.name,
        id=row["_id"],
        input=parts[2],
        context=parts[1],
        answers=(row["answer"],),
        all_classes=_LETTERS,
        length=len(row["context"]),
        instruction=parts[0],
        groups=(f"difficulty={row['difficulty']}", f"length={LENGTHS[row['length']]}"),
        official=row,
    )
