"""Subsets of a dataset's examples, for quick checks.

A subset of N examples of a dataset: the first; at random, those with the smallest hashes of seed
and id, so that a larger N only adds to them; or by length: sorted by length, then by the id's hash,
they are cut into N parts of equal size, and the middle one of each part is in. So it has the
lengths of the whole, and is the same for everyone. Of a suite's own subset (`Suite.subsets`), which
its `load` chooses, the first N are taken.
"""

import hashlib
from collections.abc import Sequence

from eval.benchmarks.suite import Example

SUBSETS = ("first", "random", "by_length")


def in_subset(
    examples: Sequence[Example],
    count: int | None,
    subset: str,
    seed: int,
) -> list[Example]:
    """Return `count` examples in their order, as `subset` says; all if there are no more."""
    if count is None or count >= len(examples) or subset not in ("random", "by_length"):
        return list(examples[:count])
    places = range(len(examples))
    if subset == "random":
        ranked = sorted(places, key=lambda place: _hash(f"{seed}\0{examples[place].id}"))
        chosen = ranked[:count]
    else:
        hashes = [_hash(example.id) for example in examples]
        ranked = sorted(places, key=lambda place: (examples[place].length, hashes[place]))
        chosen = [ranked[(2 * part + 1) * len(ranked) // (2 * count)] for part in range(count)]
    return [examples[place] for place in sorted(chosen)]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
