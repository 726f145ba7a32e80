"""Divisions of a run's examples: a subset, for quick checks; splits, one to choose a setting and one to report it; and
shards, for jobs.

A subset of N examples of a dataset: the first; at random, those with the smallest hashes of seed and id, so that a
larger N only adds to them; or by length: sorted by length, then by the id's hash, they are cut into N parts of equal
size, and the middle one of each part is in. So it has the lengths of the whole, and is the same for everyone. Of a
suite's own subset (`Suite.subsets`), which its `load` chooses, the first N are taken.

Splits: of each two neighbours in a dataset's order, the hash of the first one's id decides which is in `dev`; the other
is in `test`. So the two have equal size (up to one example) and the same mix of lengths and sources, and an example's
split does not depend on `limit`.

Shards: a shard is written i/n, the i-th (from 1) of n. All shards of a run share its fingerprint and folder. Each
writes its own files there (`eval.store.folder`), and the last one to end writes the summary.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence

from eval.benchmarks.suite import Example
from lazyllm.errors import UserError

SUBSETS = ("first", "random", "by_length")
SPLITS = ("dev", "test")


def in_subset(examples: Sequence[Example], count: int | None, subset: str, seed: int) -> list[Example]:
    """`count` examples of a dataset in their order, chosen as `subset` says; all if there are no more, or for None."""
    if count is None or count >= len(examples) or subset not in ("random", "by_length"):
        return list(examples[:count])

    def coin(number: int, *with_it: int) -> bytes:
        return hashlib.sha256("\0".join([*map(str, with_it), examples[number].id]).encode()).digest()

    if subset == "random":
        chosen = sorted(range(len(examples)), key=lambda number: coin(number, seed))[:count]
    else:
        ranked = sorted(range(len(examples)), key=lambda number: (examples[number].length, coin(number)))
        chosen = [ranked[(2 * part + 1) * len(ranked) // (2 * count)] for part in range(count)]
    return [examples[number] for number in sorted(chosen)]


def in_split(dataset: str, examples: Sequence[Example], split: str | None) -> list[Example]:
    """The examples in split "dev" or "test" (None: all). examples: of the dataset of this name, from the first on."""
    if split is None:
        return list(examples)
    chosen = []
    for number, example in enumerate(examples):
        first = examples[number - number % 2].id
        coin = hashlib.sha256(f"{dataset}\0{first}".encode()).digest()[0] % 2
        if SPLITS[(coin + number) % 2] == split:
            chosen.append(example)
    return chosen


def parse_shard(text: str) -> tuple[int, int]:
    """(i, n) of the shard i/n, the i-th (from 1) of n. Raises UserError for another text."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"shard={text}: expected the i-th of n shards, written i/n with i from 1 to n, e.g. 2/4")
    return int(match[1]), int(match[2])


def shard_numbers(tokens: Mapping[tuple[str, str], int], count: int) -> dict[tuple[str, str], int]:
    """The shard number (from 1) of each example, so that shards hold about the same number of prompt tokens.

    tokens: prompt tokens by (dataset, id), in any order. The longest examples are placed first, each into the shard
    with the fewest tokens so far: no shard gets more than 4/3 of the largest shard of the best split
    (Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17(2), 1969).
    """
    filled = [0] * min(count, len(tokens))  # further shards are empty
    numbers = {}
    for key in sorted(tokens, key=lambda key: (-tokens[key], key)):
        emptiest = filled.index(min(filled))
        filled[emptiest] += tokens[key]
        numbers[key] = emptiest + 1
    return numbers
