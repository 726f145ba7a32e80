"""Two halves of a dataset: one to choose a setting by, the other to report it on.

Of each two neighbours in a dataset's order, the hash of the first one's id decides which of them is tuned on; the other
is held out. So the halves of every dataset are of one size (but for an odd one out), a dataset's own order (lengths in
turn, sources one after the other) is the same in both, and an example stays in its half whatever `limit` is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from eval.benchmarks.longbench import Example

TUNING, HELD_OUT = "tuning", "held-out"
HALVES = (TUNING, HELD_OUT)
RULE = "of each two neighbours in a dataset's order the hash of the first one's id decides which is tuned on"


def in_half(dataset: str, examples: Sequence[Example], half: str | None) -> list[Example]:
    """The examples that lie in a half ("tuning" or "held-out"), in order; all of them for None.

    dataset: its name. examples: the dataset's, from its first one on.
    """
    if half is None:
        return list(examples)
    return [
        one for number, one in enumerate(examples) if _half(dataset, examples[number - number % 2].id, number) == half
    ]


def _half(dataset: str, first: str, number: int) -> str:
    coin = hashlib.sha256(f"{dataset}\0{first}".encode()).digest()[0] % 2
    return HALVES[(coin + number) % 2]
