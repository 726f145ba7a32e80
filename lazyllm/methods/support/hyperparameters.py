"""Types of hyperparameters, and the number of tokens that a share stands for.

A field of such a type refuses other values before a model loads: `keep: Ratio = 0.5`. So does one
of a plain type, as `sound: bool = False`. The text says what to give.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from typing import Annotated

from annotated_types import Ge, Gt, Interval, Predicate


def _is_odd(value: int) -> bool:
    return value > 0 and value % 2 == 1


Ratio = Annotated[float, Interval(gt=0, le=1), "a number in (0, 1]"]
Count = Annotated[int, Ge(1), "a whole number of 1 or more"]
CountOrZero = Annotated[int, Ge(0), "a whole number of 0 or more"]
Odd = Annotated[int, Predicate(_is_odd), "an odd number"]
ModelName = Annotated[str, "the name of a model (folder, hub id or preset)"]
Positive = Annotated[float, Gt(0), "a number above 0"]


def sorted_layers(layers: Sequence[int] | None) -> tuple[int, ...] | None:
    """Put layers into ascending order, each once; None stays None. Raises ValueError for []."""
    if layers is None:
        return None
    if not layers:
        raise ValueError(f"layers={layers!r}: give a list of layers such as [8, 12], or null")
    return tuple(sorted(set(layers)))


@lru_cache(maxsize=1024)  # a decoding step asks at each boundary
def keep_count(ratio: float, n: int) -> int:
    """Compute ceil(ratio * n), exact for the ratio as written in decimal: 0.7 of 10 is 7."""
    return ceil(Fraction(str(ratio)) * n)


def share_of(share: float, n: int) -> int:
    """Compute floor(share * n), exact as `keep_count`."""
    return floor(Fraction(str(share)) * n)


def count_of(keep: float, n: int) -> int:
    """Turn `keep` into a number of n tokens: an int is that, a float a share, rounded up."""
    return min(keep, n) if isinstance(keep, int) else keep_count(keep, n)
