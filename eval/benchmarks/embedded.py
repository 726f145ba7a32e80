"""The embedded suite: six small datasets for the tiny model, one for each of LongBench's tasks.

All six need the same skill, finding the words after a key in a long prompt: a model of a million
parameters can learn it, and pruning can break it.

| name     | needles in the context           | the prompt ends with  | the answer                |
|----------|----------------------------------|-----------------------|---------------------------|
| lookup   | `entry KEY a b c.`               | `Question: entry KEY` | `a b c.`                  |
| hops     | `link KEY K2.`, `entry K2 a b.`  | `Chain: link KEY`     | `K2 a b.`                 |
| digest   | `entry KEY a b c.`, `first KEY.` | `Digest: first`       | `a b c. second d e f. ...`|
| shots    | `Example ... KEY class.` thrice  | `Example ... KEY`     | `class.`                  |
| retrieve | `a b c 7.` in paragraph 7        | `Where: a b c`        | `7.`                      |
| complete | `proc KEY a b c;`                | `call KEY`            | `a b c;`                  |

All other needles of a context are distractors of the same form. Needles occur at every depth. A
prompt has exactly 512, 1024 or 2048 tokens of the tiny tokenizer (`<|begin|>` included), in turn:
the third part of the id says it.

The rows lie in this package (`embedded_rows.jsonl.xz`, in LongBench's format). The code that drew
them, and that trained `tiny` on rows of another split, is `eval/benchmarks/embedded.py` of commit
e6da5df7.
"""

import lzma
from functools import cache, partial
from pathlib import Path

from eval.benchmarks.rows import load_lines
from eval.benchmarks.suite import Dataset, DataSettings, LoadedDataset, Suite, register

# The prompts, in the format of LongBench's `dataset2prompt.json`
TEMPLATES: dict[str, str] = {
    "lookup": "Ledger: {context}\nQuestion: entry {input}",
    "hops": "Documents:\n{context}\nChain: link {input}",
    "digest": "Notes: {context}\nDigest: {input}",
    "shots": "Learn:\n{context}\nExample {input}",
    "retrieve": "Pages:\n{context}\nWhere: {input}",
    "complete": "File:\n{context}\ncall {input}",
}
# The longest answer, its end token and a little more
MAX_NEW_TOKENS: dict[str, int] = {
    "lookup": 8,
    "hops": 8,
    "digest": 20,
    "shots": 4,
    "retrieve": 4,
    "complete": 8,
}
ROWS = 240  # of each dataset, 80 of each prompt length


@cache
def _lines() -> list[bytes]:
    file = Path(__file__).with_name("embedded_rows.jsonl.xz")
    return lzma.decompress(file.read_bytes()).split(b"\n")


def load(dataset: Dataset, settings: DataSettings) -> LoadedDataset:
    """Read the rows of one dataset."""
    name = dataset.name
    first = ROWS * list(TEMPLATES).index(name)
    lines = b"\n".join(_lines()[first : first + ROWS])
    source = f"embedded suite, {name}"
    tokens = MAX_NEW_TOKENS[name]
    return load_lines(dataset, lines, source, TEMPLATES[name], tokens, settings.on_error)


# 1024 is the middle one of the prompts' lengths
_dataset = partial(Dataset, suite="embedded", chat_wrap=False, prompt_tokens=1024)

SUITE = register(
    Suite(
        name="embedded",
        datasets=(
            _dataset("lookup", "single_doc_qa", "f1"),
            _dataset("hops", "multi_doc_qa", "f1"),
            _dataset("digest", "summarization", "rouge"),
            # protected: "Example", a sentence with its key, then the class and a full stop
            _dataset(
                "shots",
                "few_shot",
                "classification",
                first_line=True,
                protected=r"^Example| \S+$",
            ),
            _dataset("retrieve", "synthetic", "retrieval"),
            _dataset("complete", "code", "code_similarity"),
        ),
        load=load,
        models=("tiny",),
        limit=12,  # enough for a first look
    )
)
