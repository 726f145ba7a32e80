"""LongBench v2 (arXiv 2412.15204): 503 multiple-choice questions on 8,000 to 2 million words.

A folder (`data.dir=FOLDER`) holds the official `data.json` and `prompts/0shot.txt`. Without one,
rows come from the hub (`THUDM/LongBench-v2`), and the prompt from LongBench's repository, pinned by
commit and sha256. Prompt, truncation and scoring are those of `pred.py` (commit 2e00731), without
chain of thought.

Ours: answers are greedy, officially sampled at temperature 0.1; an empty answer scores 0,
officially it is left out of the results.
"""

from functools import partial
from typing import Any

from eval.benchmarks.downloads import (
    cached_file,
    given_file,
    hub_file,
    official_cache,
    official_file,
)
from eval.benchmarks.rows import FILLED, TEXT, Check, check_fields, loaded, one_of
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite, register
from eval.benchmarks.tables import read_table
from lazyllm.errors import UserError

HUB_REPOSITORY, ROWS = "THUDM/LongBench-v2", "data.json"
PROMPT = "prompts/0shot.txt"
COMMIT = "2e00731f8d0bff23dc4325161044d0ed8af94c1e"
PROMPT_URL = f"https://raw.githubusercontent.com/THUDM/LongBench/{COMMIT}/{PROMPT}"
PROMPT_SHA256 = "68a162252bc9ff71d5d7abca3d69bb31aac3c35f832d657a2866f2018b8a6950"
MAX_NEW_TOKENS = 128
# A row's `length`: the group of these rows
LENGTHS = {
    "short": "short (0-32k words)",
    "medium": "medium (32-128k words)",
    "long": "long (128k-2M words)",
}
_GIVE = f"LongBench v2's {ROWS} and {PROMPT}"
_LETTERS = ("A", "B", "C", "D")
_PLACES = {"$Q$": "question"} | {f"$C_{letter}$": f"choice_{letter}" for letter in _LETTERS}
_FIELDS: dict[str, Check] = {
    "_id": FILLED,
    "domain": TEXT,
    "sub_domain": TEXT,
    "difficulty": one_of(("easy", "hard")),
    "length": one_of(LENGTHS),
    **dict.fromkeys(_PLACES.values(), TEXT),
    "answer": one_of(_LETTERS),
    "context": FILLED,
}


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """Load the rows, from a folder or the hub. Raises UserError as `longbench.load`."""
    folder = settings.dir
    content = official_file("LongBench v2", PROMPT, PROMPT_URL, PROMPT_SHA256, folder, _GIVE)
    try:
        template = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{PROMPT}: not UTF-8 text ({error})") from error
    if absent := [place for place in ("$DOC$", *_PLACES) if place not in template]:
        raise UserError(f"{PROMPT}: expected LongBench v2's prompt, with the place {absent[0]}")
    if folder is not None:
        file = given_file(folder, ROWS, _GIVE)
    else:
        file = hub_file(HUB_REPOSITORY, ROWS, revision=None, give=_GIVE)  # the newest
    rows, parse = read_table(str(file)), partial(_make_example, dataset, template)
    return loaded(dataset, rows, parse, settings.on_error, MAX_NEW_TOKENS, [template])


def is_cached(settings: DataSettings) -> bool:
    """Whether rows and prompt are in the caches."""
    prompt = official_cache("LongBench v2") / PROMPT
    return prompt.is_file() and cached_file(HUB_REPOSITORY, ROWS) is not None


def _make_example(dataset: Dataset, template: str, row: Any, number: int) -> Example:
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


_ONLY = Dataset(
    "longbench_v2",
    "multiple_choice",
    "multiple_choice",
    suite="longbench_v2",
    decode_halves=False,
)
SUITE = register(Suite(name="longbench_v2", datasets=(_ONLY,), load=load, cached=is_cached))
