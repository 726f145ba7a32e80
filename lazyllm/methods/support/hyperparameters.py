"""Hyperparameters: fields that refuse bad values, and the number of tokens that a keep ratio or a count stands for."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, field
from fractions import Fraction
from functools import lru_cache, partial
from math import ceil, floor
from typing import Any


def checked(check: Callable[..., object], default: Any = MISSING, kw_only: bool = False, **limits: Any) -> Any:
    """A hyperparameter: a field whose value `check(name, value, **limits)` may refuse. None passes as the default.

    >>> keep: float = checked(check_ratio, 0.5)
    """
    return field(default=default, kw_only=kw_only, metadata={"check": partial(check, **limits)})


def check_ratio(what: str, ratio: Any) -> float:
    """A keep ratio as a float. Raises TypeError or ValueError, naming `what`, unless it is a number in (0, 1]."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise TypeError(f"{what} is a number in (0, 1], got {ratio!r}")
    if not 0 < ratio <= 1:
        raise ValueError(f"{what} lies in (0, 1], got {ratio}")
    return float(ratio)


def check_int(what: str, value: Any, least: int = 1) -> int:
    """The value. Raises TypeError or ValueError, naming `what`, unless it is a whole number of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} is a whole number of {least} or more, got {value!r}")
    if value < least:
        raise ValueError(f"{what} is a whole number of {least} or more, got {value}")
    return value


def check_bool(what: str, value: Any) -> None:
    """Refuse what is neither true nor false. Raises TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} is true or false, got {value!r}")


def check_odd(what: str, value: Any) -> None:
    """Refuse what is no odd number, of 1 or more. Raises TypeError or ValueError."""
    if check_int(what, value, 1) % 2 == 0:
        raise ValueError(f"{what}={value}: give an odd number")


def check_count_or_ratio(what: str, value: Any, least: int = 1) -> None:
    """Refuse a value that is neither a number of `least` or more (int) nor a share (float). Raises as `check_ratio`."""
    if isinstance(value, int):
        check_int(what, value, least)
    else:
        check_ratio(what, value)


def check_positive(what: str, value: Any, below: float = 1e6) -> None:
    """Refuse what is no number above 0. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < below:
        raise ValueError(f"{what}={value!r}: give a number above 0 and below {below:g}")


def check_choice(what: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse what is none of the choices. Raises ValueError."""
    if value not in choices:
        raise ValueError(f"{what}={value!r}: give one of {', '.join(choices)}")


def layers_of(layers: Any) -> tuple[int, ...] | None:
    """Layers, from 1, in ascending order; None for None. Raises TypeError or ValueError unless it is a list of some."""
    if layers is None:
        return None
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise ValueError(f"layers={layers!r}: give a list of layers such as [8, 12], or null")
    return tuple(sorted({check_int("layers", layer) for layer in layers}))


def check_model_name(what: str, value: Any) -> None:
    """Refuse what cannot name a model. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{what}={value!r}: give the name of a model (folder, hub id or preset)")


@lru_cache(maxsize=1024)  # a decoding step asks at each boundary
def keep_count(ratio: float, n: int) -> int:
    """ceil(ratio * n), exact for the ratio as written in decimal: 0.7 of 10 is 7."""
    return ceil(Fraction(str(ratio)) * n)


def share_of(share: float, n: int) -> int:
    """floor(share * n), exact as `keep_count`."""
    return floor(Fraction(str(share)) * n)


def count_of(keep: float, n: int) -> int:
    """`keep` as a number of n tokens: an int is that number, at most n; a float is a share, rounded up."""
    return min(keep, n) if isinstance(keep, int) else keep_count(keep, n)
