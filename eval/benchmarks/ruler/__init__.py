"""RULER (Hsieh et al., arXiv 2404.06654): 13 synthetic tasks, with rows made for the run's tokenizer, length and seed.

Rows equal the official ones. Prompts and settings come from https://github.com/NVIDIA/RULER at `sources.COMMIT`, and
are not stored here. Ours: each dataset is a task, so that the mean over tasks is RULER's average over its 13 tasks.
"""

from dataclasses import dataclass

from eval.benchmarks.prompts import tokenizer_for_rows, wrap_tokens
from eval.benchmarks.rows import made_here
from eval.benchmarks.ruler.generator import rows
from eval.benchmarks.ruler.sources import (
    OFFICIAL_SHA256,
    TASKS,
    check_haystack,
    corpus_sha256,
    missing,
    read_tasks,
    words,
)
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite, register, setting
from lazyllm.errors import require

ROWS = 500  # of a task, the official number
VERSION = 1


@dataclass
class RulerConfig:
    length: int = setting(4096, "maximum tokens of a prompt, its chat template and its answer together")
    seed: int = setting(42, "of the rows; 42 is the official one")
    haystack: str | None = setting(
        None,
        "the text around needles: a text file, a folder of `.txt` and `.md` files, or RULER's `PaulGrahamEssays.json`; "
        "`null`: that file in `data.dir`",
    )


def check(dataset: Dataset, settings: DataSettings) -> str | None:
    """Why a task's text or dataset cannot be loaded, or None. Raises UserError for settings that allow no rows."""
    options = settings.options
    require(options.length > 0, "ruler.length", options.length, "a number of tokens of at least 1")
    require(0 <= options.seed < 2**32, "ruler.seed", options.seed, "0 to 4294967295, the seeds of NumPy's generator")
    check_haystack("ruler", options.haystack)
    task = read_tasks(settings.dir)[dataset.name]
    if task.kind == "common_words_extraction" or "words" in task.settings.values():
        words("noun")
    return missing(dataset, settings)


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """The first rows of one dataset. `data_sha256` covers all that rows are made from, independent of their number.

    Raises UserError for what `check` refuses, a missing corpus, or a length that is too short for the task.
    """
    task, options = read_tasks(settings.dir)[dataset.name], settings.options
    tokenizer = tokenizer_for_rows(settings.model, "ruler")
    reserved, count = wrap_tokens(tokenizer, settings.chat), ROWS if settings.limit is None else settings.limit
    made = rows(task, tokenizer, settings, count, reserved)
    hashed = {
        "suite": VERSION,
        "task": task.name,
        "length": options.length,
        "seed": options.seed,
        "chat tokens": reserved,
        "templates": OFFICIAL_SHA256,
        "corpus": corpus_sha256(task, settings),
        "first row": made[0].official,
    }
    source = f"RULER, {dataset.name}, {options.length} tokens, seed {options.seed}"
    return made_here(dataset, made, task.max_new_tokens, hashed, source, max(ROWS, len(made)))


_METRICS = {name: "string_match_part" if name.startswith("qa_") else "string_match_all" for name in TASKS}

SUITE = register(
    Suite(
        name="ruler",
        datasets=tuple(Dataset(name, name, metric, suite="ruler", truncate=False) for name, metric in _METRICS.items()),
        load=load,
        options=RulerConfig,
        check=check,
    )
)
