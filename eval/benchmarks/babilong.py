"""BABILong (arXiv 2406.10149): facts of bAbI's tasks 1 to 5, scattered over the text of books; short answers.

`data.dir=FOLDER` gives a folder with `data/<task>/<length>.json`, as on the hub, and `prompts.py`. Without it, rows
come through the package `datasets` (`RMT-team/babilong`), and prompts from a commit of the authors' repository; only
their dictionary of these tasks is read, and checked by sha256. Prompts and scores are those of `babilong/prompts.py`
(commit ffa075f) and `babilong/metrics.py` (eeec607); an answer has at most 20 tokens.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from eval.benchmarks.downloads import HubDataset, literals, official_file
from eval.benchmarks.metrics import GIVERS_AND_GIFTS, PLACES
from eval.benchmarks.rows import TEXT, check_fields, loaded, sha256_of
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset, Suite, check_lengths, setting
from lazyllm.errors import UserError

PROMPTS = "prompts.py"
PROMPTS_URL = (
    "https://raw.githubusercontent.com/booydar/babilong/ffa075fb7aff504275037efc04d3aeaa5b1f65b0/babilong/prompts.py"
)
PROMPTS_SHA256 = "f4eba1cfd14199ef40809dcb25ee732307a13200a0e19e4e8953a1972ead38aa"  # of `read_prompts`

MAX_NEW_TOKENS = 20
LENGTHS = ("0k", "1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1M", "10M")

LABELS = dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), PLACES) | {"qa5": GIVERS_AND_GIFTS}
_PARTS = ("instruction", "examples", "post_prompt")
_HUB = HubDataset("RMT-team/babilong", f"data/<task>/<length>.json and {PROMPTS}")
_FIELDS = {"input": TEXT, "question": TEXT, "target": TEXT}


@dataclass
class BabilongConfig:
    lengths: list[str] = setting(["4k"], "names of the dataset's lengths, from `0k` to `10M`")


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """One task's rows at all lengths. Raises UserError for an unusable row or file, and without cache and network."""
    task, folder, lengths = dataset.name.removeprefix("babilong_"), settings.dir, settings.options.lengths
    content = official_file(
        "BABILong", PROMPTS, PROMPTS_URL, PROMPTS_SHA256, folder, _HUB.give, lambda text: sha256_of(read_prompts(text))
    )
    prompts = read_prompts(content)[task]
    files = {length: _HUB.rows(settings, f"data/{task}/{length}.json", length, task) for length in lengths}
    rows = [(where, (length, n, row)) for length, (rows, _, _) in files.items() for n, (where, row) in enumerate(rows)]
    source, sha256 = files[lengths[0]][1], sha256_of([sha256 for _, _, sha256 in files.values()])
    parse = partial(_example, dataset, prompts)
    return loaded(dataset, (rows, source, sha256), parse, settings.on_error, MAX_NEW_TOKENS, [prompts])


def read_prompts(content: bytes) -> dict[str, dict[str, str]]:
    """The official prompts of the five tasks, from their Python file. Raises UserError for another file."""
    try:
        (prompts,) = literals(content, "DEFAULT_PROMPTS")
        return {task: {part: prompts[task][part] for part in _PARTS} for task in LABELS}
    except (SyntaxError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{PROMPTS}: not BABILong's prompts ({type(error).__name__}: {error})") from error


SUITE = Suite(
    name="babilong",
    version=2,
    datasets=tuple(
        Dataset(f"babilong_{task}", "facts_in_books", "label", suite="babilong", decode_halves=False) for task in LABELS
    ),
    load=load,
    options=BabilongConfig,
    check=partial(check_lengths, LENGTHS),
    missing=_HUB.missing,
)


def _example(dataset: Dataset, prompts: dict[str, str], placed: tuple[str, int, Any], _: int) -> Example:
    length, number, row = placed
    check_fields(row, _FIELDS)
    labels = LABELS[dataset.name.removeprefix("babilong_")]
    return Example(
        dataset=dataset.name,
        id=f"{length}-{number}",
        input=f"\n</context>\n\nQuestion: {row['question']}".rstrip(),
        context=row["input"].strip(),
        answers=(row["target"], *(label for label in labels if label in row["question"].lower())),
        length=len(row["input"]),
        instruction="\n\n".join([*(prompts[part] for part in _PARTS), "<context>\n"]),
        groups=(f"length={length}",),
        official=row,
    )
