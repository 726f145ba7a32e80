"""A run in several jobs: which examples each of them measures.

A shard is written i/n, the i-th (from 1) of n. All shards of a run have one fingerprint and one folder. Each writes
files of its own there (`eval.store.folder`), and the last one to end makes the summary of all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """The `number`-th (from 1) of `count` shards."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def file_part(self) -> str:
        """What its files' names end in, before the suffix."""
        return f"-{self.number}-of-{self.count}"


def parse_shard(text: str) -> Shard:
    """The shard that is written i/n. Raises ValueError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"{text!r} is not the i-th of n shards, written i/n with i from 1 to n, e.g. 2/4")
    return Shard(int(match[1]), int(match[2]))


def split(tokens: Mapping[tuple[str, str], int], count: int) -> dict[tuple[str, str], int]:
    """The shard number (from 1) of each example, so that shards hold about as many prompt tokens.

    tokens: prompt tokens by (dataset, id); their order does not matter. The longest examples are placed first, each
    into the shard that holds the fewest tokens so far: no shard gets more than 4/3 of what the best split gives its
    fullest one (Graham, Bounds on Multiprocessing Timing Anomalies, SIAM J. Appl. Math. 17(2), 1969).
    """
    filled = [0] * min(count, len(tokens))  # shards beyond that get nothing
    numbers = {}
    for key in sorted(tokens, key=lambda key: (-tokens[key], key)):
        emptiest = filled.index(min(filled))
        filled[emptiest] += tokens[key]
        numbers[key] = emptiest + 1
    return numbers
