"""The embedded suite: six small datasets for the tiny model, one for each of LongBench's tasks.

All six need the same skill, finding the words after a key in a long prompt: a model of a million parameters can learn
it, and pruning can break it.

| name     | task           | needles in the context           | the prompt ends with  | the answer                |
|----------|----------------|----------------------------------|-----------------------|---------------------------|
| lookup   | single_doc_qa  | `entry KEY a b c.`               | `Question: entry KEY` | `a b c.`                  |
| hops     | multi_doc_qa   | `link KEY K2.`, `entry K2 a b.`  | `Chain: link KEY`     | `K2 a b.`                 |
| digest   | summarization  | `entry KEY a b c.`, `first KEY.` | `Digest: first`       | `a b c. second d e f. ...`|
| shots    | few_shot       | `Example ... KEY class.` thrice  | `Example ... KEY`     | `class.`                  |
| retrieve | synthetic      | `a b c 7.` in paragraph 7        | `Where: a b c`        | `7.`                      |
| complete | code           | `proc KEY a b c;`                | `call KEY`            | `a b c;`                  |

All other needles of a context are distractors of the same form. Needles occur at every depth. A prompt has exactly 512,
1024 or 2048 tokens of the tiny tokenizer (`<|begin|>` included), in turn: the third part of the id says it.

The rows lie in this package (`embedded_rows.jsonl.xz`: a row in LongBench's format, and the places of
the needles, which nothing reads). The code that drew them, and that trained `tiny` on rows of another split, is
`eval/benchmarks/embedded.py` of commit e6da5df7.

With `turns=N` a row asks N questions of its context, each about another needle, in the form that training had: the
answer, its end token, and the words between context and input.
"""

import json
import lzma
from functools import cache, partial
from pathlib import Path
from typing import Any

from eval.benchmarks.rows import canonical, load_lines
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite, register
from lazyllm.errors import UserError

# The prompts, in the format of LongBench's `dataset2prompt.json`: placeholders {context} and {input}
TEMPLATES: dict[str, str] = {
    "lookup": "Ledger: {context}\nQuestion: entry {input}",
    "hops": "Documents:\n{context}\nChain: link {input}",
    "digest": "Notes: {context}\nDigest: {input}",
    "shots": "Learn:\n{context}\nExample {input}",
    "retrieve": "Pages:\n{context}\nWhere: {input}",
    "complete": "File:\n{context}\ncall {input}",
}
# The longest answer, its end token and a little more
MAX_NEW_TOKENS: dict[str, int] = {"lookup": 8, "hops": 8, "digest": 20, "shots": 4, "retrieve": 4, "complete": 8}
MAX_TURNS = 8  # questions of a row
ROWS = 240  # of each dataset, 80 of each prompt length


@cache
def _lines() -> list[bytes]:
    return lzma.decompress(Path(__file__).with_name("embedded_rows.jsonl.xz").read_bytes()).split(b"\n")


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """One dataset."""
    name, turns = dataset.name, settings.turns or 1
    first = ROWS * list(TEMPLATES).index(name)
    rows: list[Any] = [json.loads(line)[0] for line in _lines()[first : first + ROWS]]
    for row in rows:
        later = row.pop("turns", [])[: turns - 1]
        row.update({"turns": later} if later else {})
    lines = b"\n".join(map(canonical, rows))
    source = f"embedded suite, {name}"
    return load_lines(dataset, lines, source, TEMPLATES[name], MAX_NEW_TOKENS[name], settings.on_error)


def check(dataset: Dataset, settings: DataSettings) -> str | None:
    """Why a dataset has no rows of several turns, or None. Raises UserError for more turns than a row has."""
    if (settings.turns or 1) > MAX_TURNS:
        raise UserError(f"turns={settings.turns}: a row of the embedded suite has up to {MAX_TURNS} questions")
    if dataset.name == "digest" and (settings.turns or 1) > 1:
        return "a context has one question only, so there are no rows with later turns"
    return None


_dataset = partial(Dataset, suite="embedded", chat_wrap=False, prompt_tokens=1024)  # the middle one of the lengths

SUITE = register(
    Suite(
        name="embedded",
        datasets=(
            _dataset("lookup", "single_doc_qa", "f1"),
            _dataset("hops", "multi_doc_qa", "f1"),
            _dataset("digest", "summarization", "rouge"),
            # protected: "Example", a sentence with its key, then the class and a full stop
            _dataset("shots", "few_shot", "classification", first_line=True, protected=r"^Example| \S+$"),
            _dataset("retrieve", "synthetic", "retrieval"),
            _dataset("complete", "code", "code_similarity"),
        ),
        load=load,
        models=("tiny",),
        limit=12,  # enough for a first look
        check=check,
    )
)
