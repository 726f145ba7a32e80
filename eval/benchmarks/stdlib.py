"""The stdlib suite: completion of the next line of real Python source, in two datasets scored like LongBench's code.

| name       | the prompt                                        | the gold line                                      |
|------------|---------------------------------------------------|----------------------------------------------------|
| next_line  | the file up to a line (as LongBench's lcc)        | has a name that the 20 lines before it lack        |
| cross_file | chunks of other files, then the file up to a line | has a name that only the other files have          |
|            | (as LongBench's repobench-p)                      |                                                    |

Every name of a gold line occurs in its prompt, so distant parts of the prompt matter. The files are those of CPython
3.11.7's standard library that `scripts/dev/train.py` leaves out of training (`is_held_out`). Chunks of other files are
chosen without the gold line: those that share most names with the lines before it, the best one last.

The rows are part of this package (`stdlib_rows.jsonl.xz`; copyright Python Software Foundation, PSF License 2), in
LongBench's format; the code that chose them is `eval/benchmarks/stdlib.py` of commit 421a8fd. Prompts have about 3,000,
6,000 and 9,000 characters, in turn: 1,000, 2,000 and 3,000 tokens of the coder's tokenizer.
"""

import lzma
from pathlib import Path

from eval.benchmarks.rows import load_lines
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite

ROWS = 240  # of each dataset, 80 of each prompt length
MAX_NEW_TOKENS = 48

TEMPLATES = {"next_line": "{context}", "cross_file": "{context}{input}"}

_FILE = Path(__file__).with_name("stdlib_rows.jsonl.xz")  # the rows of both, in this order


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """One dataset."""
    first = ROWS * list(TEMPLATES).index(dataset.name)
    data = b"\n".join(lzma.decompress(_FILE.read_bytes()).split(b"\n")[first : first + ROWS])
    source = f"stdlib suite, {dataset.name}"
    return load_lines(dataset, data, source, TEMPLATES[dataset.name], MAX_NEW_TOKENS, settings.on_error)


SUITE = Suite(
    name="stdlib",
    datasets=tuple(
        Dataset(name, "code", "code_similarity", suite="stdlib", chat_wrap=False, newline_ends=True)
        for name in TEMPLATES
    ),
    load=load,
    models=("coder",),
    rows_here=True,
    limit=24,  # enough for a first look
    reference_tokens=2048,  # about the middle one
)
