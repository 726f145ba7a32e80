"""LazyLLM's schedule of layers and keep ratios (arXiv 2407.14057, section 3.2 and Figure 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lazyllm.engine.depth import Depth


@dataclass(frozen=True)
class Schedule:
    """Pruning layers and their keep ratios: `Schedule({9: 0.7, 19: 0.7, 28: 0.7})`.

    keep: {layer: ratio}. After layer `layer` (1-based, as in the paper) the share `ratio` (0 <
        ratio <= 1) of the tokens that entered it goes on. A layer may be a share of the depth
        (`Depth.at_share`): `{"30%": 0.7}`. An empty mapping prunes nothing: the baseline.

    Ours: the paper gives a percentile, we give a keep ratio and keep exactly `ceil(ratio * n)` of n
    tokens. The ratio is read as the decimal number that was written: 0.7 of 10 is 7 and not 8.

    Raises ValueError for a layer below 1 or a ratio outside (0, 1]; TypeError for other types.
    """

    keep: Mapping[int | str, float]

    def __post_init__(self) -> None:
        if not isinstance(self.keep, Mapping):
            raise TypeError(f"a schedule is a mapping {{layer: keep ratio}}, got {self.keep!r}")
        keep = {_layer(layer): _ratio(layer, ratio) for layer, ratio in self.keep.items()}
        if len(keep) < len(self.keep):
            raise ValueError(f"a layer is twice in the schedule {dict(self.keep)!r}")
        object.__setattr__(self, "keep", dict(sorted(keep.items(), key=_order)))

    def __hash__(self) -> int:
        return hash(tuple(self.keep.items()))

    @classmethod
    def paper(cls, depth: Depth) -> Schedule:
        """Make Figure 4's schedule: 30 % of the tokens dropped after 30, 60 and 90 % of the depth.

        For 32 layers these are 9, 19 and 28, the groups that Figure 7 names. Ours: other depths
        round down, to a layer that sees the whole prompt; boundaries at layer 0 or at the same
        layer are left out.
        """
        layers = {depth.at_share(Fraction(tenths, 10)) for tenths in (3, 6, 9)} - {0}
        return cls(dict.fromkeys(layers, 0.7))

    @classmethod
    def parse(cls, value: Schedule | Mapping[Any, Any] | str, depth: Depth) -> Schedule:
        """Read a schedule for a model's layers: "paper", "none", a mapping, its text, a schedule.

        Text is a mapping in Python, JSON or YAML (`{2: 0.5, 5: 0.5}`), or `2:0.5+5:0.5`. In the
        result all layers are numbers. Raises ValueError for other text, or too deep a layer.
        """
        if value == "paper":
            return cls.paper(depth)
        given = value.keep if isinstance(value, Schedule) else value
        if isinstance(given, str):
            given = {} if given == "none" else _mapping_of(given)
        given = cls(given).keep
        keep = {
            depth.at_share(_share(layer)) if isinstance(layer, str) else layer: ratio
            for layer, ratio in given.items()
        }
        if len(keep) < len(given):
            full = ", ".join(map(str, depth.full))
            which = f", of which {full} see the whole prompt" if depth.windows else ""
            raise ValueError(
                f"two shares of the depth in {dict(given)!r} are the same of {depth.count} "
                f"layers{which}"
            )
        if beyond := [layer for layer in keep if layer > depth.count]:
            raise ValueError(
                f"the schedule prunes after layer {beyond[0]}, but the model has only "
                f"{depth.count} layers: give schedule=paper, shares such as 30%, or earlier layers"
            )
        return cls({**keep})


def _mapping_of(text: str) -> dict[str, float]:
    """Read {layer: ratio} from a schedule's text."""
    inner = text.strip()
    inner = inner[1:-1] if inner[:1] + inner[-1:] == "{}" else inner
    pairs = [pair.rpartition(":") for pair in re.split(r"[,+]", inner)]
    try:
        mapping = {layer.strip(" '\""): float(ratio) for layer, _, ratio in pairs}
    except ValueError:
        mapping = {}
    if not mapping or "" in mapping or len(mapping) < len(pairs) or set(inner) & {"{", "}"}:
        raise ValueError(
            f"schedule {text!r}: expected 'paper', 'none', or a keep ratio for each pruning layer, "
            "as {9: 0.7, 19: 0.7} or 9:0.7+19:0.7"
        )
    return mapping


def _share(layer: str) -> Fraction:
    """Read a share of the depth such as "12.5%"."""
    try:
        if "e" in layer.lower():  # a Fraction would hold every digit of 1e999999999
            raise ValueError("an exponent")
        share = Fraction(layer.strip()[:-1].strip()) / 100
        if not 0 < share <= 1:
            raise ValueError("not in the model")
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"a pruning layer is a whole number or a share of the depth like 50%, got {layer!r}"
        ) from error
    return share


def _layer(layer: Any) -> int | str:
    """Check a layer: a number, also as Hydra's or JSON's text, or a share of the depth."""
    if isinstance(layer, str) and layer.strip().endswith("%"):
        _share(layer)
        return layer
    number = int(layer) if isinstance(layer, str) and layer.strip().isdecimal() else layer
    if isinstance(number, bool) or not isinstance(number, int):
        raise TypeError(f"a pruning layer is a whole number, 1 for the first layer; got {layer!r}")
    if number < 1:
        raise ValueError(f"pruning layers count from 1, got {number}")
    return number


def _order(entry: tuple[int | str, float]) -> tuple[bool, Any]:
    layer, _ = entry
    return isinstance(layer, str), layer


def _ratio(layer: Any, ratio: Any) -> float:
    """Check a keep ratio."""
    what = f"the keep ratio after layer {layer}"
    if isinstance(ratio, bool) or not isinstance(ratio, int | float):
        raise TypeError(f"{what} is a number in (0, 1], got {ratio!r}")
    if not 0 < ratio <= 1:
        raise ValueError(f"{what} lies in (0, 1], got {ratio}")
    return float(ratio)
