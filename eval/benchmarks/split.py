"""Divisions of a run's examples: halves, to choose a setting by one and report it on the other; and shards, for jobs.

Halves: of each two neighbours in a dataset's order, the hash of the first one's id decides which is tuned on; the other
is held out. So the halves of every dataset are of one size (but for an odd one out), a dataset's own order (lengths in
turn, sources one after the other) is the same in both, and an example stays in its half whatever `limit` is.

Shards: a shard is written i/n, the i-th (from 1) of n. All shards of a run have one fingerprint and one folder. Each
writes files of its own there (`eval.store.folder`), and the last one to end makes the summary of all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eval.benchmarks.suite import Example
from lazyllm.errors import UserError

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
        example
        for number, example in enumerate(examples)
        if _half(dataset, examples[number - number % 2].id, number) == half
    ]


def _half(dataset: str, first: str, number: int) -> str:
    coin = hashlib.sha256(f"{dataset}\0{first}".encode()).digest()[0] % 2
    return HALVES[(coin + number) % 2]


@dataclass(frozen=True)
class Shard:
    """The `number`-th (from 1) of `count` shards."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def file_part(self) -> str:
        """The end of its files' names, before the suffix."""
        return f"-{self.number}-of-{self.count}"


def parse_shard(text: str) -> Shard:
    """The shard that is written i/n. Raises UserError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"shard={text}: expected the i-th of n shards, written i/n with i from 1 to n, e.g. 2/4")
    return Shard(int(match[1]), int(match[2]))


def shard_numbers(tokens: Mapping[tuple[str, str], int], count: int) -> dict[tuple[str, str], int]:
    """The shard number (from 1) of each example, so that shards hold about as many prompt tokens.

    tokens: prompt tokens by (dataset, id), in any order. The longest examples are placed first, each into the shard
    that holds the fewest tokens so far: no shard gets more than 4/3 of what the best split gives its fullest one
    (Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17(2), 1969).
    """
    filled = [0] * min(count, len(tokens))  # shards beyond that get nothing
    numbers = {}
    for key in sorted(tokens, key=lambda key: (-tokens[key], key)):
        emptiest = filled.index(min(filled))
        filled[emptiest] += tokens[key]
        numbers[key] = emptiest + 1
    return numbers
