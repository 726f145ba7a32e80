"""Schedules from arbitrary values: exact decimal arithmetic as the oracle, and ValueError or TypeError for the rest."""

from __future__ import annotations

import json
from decimal import ROUND_CEILING, Decimal
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from lazyllm import Schedule
from lazyllm.methods import Lazy

DEPTHS = st.integers(1, 100)
RATIOS = st.decimals("0.0001", "1", places=4).map(float) | st.floats(0, 1, exclude_min=True)
KEEPS = st.dictionaries(st.integers(1, 100), RATIOS, max_size=6)
LAYERS = st.one_of(
    st.integers(-3, 120),
    st.text(max_size=6),
    st.integers(-3, 120).map(str),
    st.floats(-10, 120).map(lambda share: f"{share}%"),
    st.text("0123456789.eE+-/_ %", max_size=14),
    st.floats(),
    st.booleans(),
    st.none(),
    st.tuples(),
)
ANY_RATIOS = st.one_of(RATIOS, st.floats(), st.integers(), st.text(max_size=4), st.booleans(), st.none())
ANYTHING = st.one_of(
    st.text(max_size=8),
    st.dictionaries(LAYERS, ANY_RATIOS, max_size=4),
    st.lists(st.integers(), max_size=2),
    st.floats(),
    st.none(),
    st.integers(),
)


def decimal_keep(ratio: float, n: int) -> int:
    return int((Decimal(repr(ratio)) * n).to_integral_value(ROUND_CEILING))


@given(KEEPS)
def test_schedule_is_parsed_from_the_command_line(keep: dict[int, float]) -> None:
    text = "{" + ", ".join(f"{layer}: {ratio!r}" for layer, ratio in keep.items()) + "}"
    (override,) = OverridesParser.create().parse_overrides([f"method.schedule={text}"])
    assert Schedule.parse(override.value(), 100) == Schedule(keep)  # type: ignore[arg-type]


@given(ANYTHING, DEPTHS)
@example({"1e999999999%": 0.5}, 8)
@example({"1e-999999999%": 0.5}, 8)
@example({"9" * 5000: 0.5}, 8)
@example({"9" * 5000 + "%": 0.5}, 8)
@example({1: 10**400}, 8)
@example({"１": 0.5}, 8)
def test_other_values_are_refused(value: Any, num_layers: int) -> None:
    try:
        schedule = Schedule.parse(value, num_layers)
    except (ValueError, TypeError) as error:
        message = str(error)
        assert message
        return
    assert all(type(layer) is int and 1 <= layer <= num_layers for layer in schedule.keep)
    assert all(type(ratio) is float and 0 < ratio <= 1 for ratio in schedule.keep.values())
    assert list(schedule.keep) == sorted(schedule.keep)
    assert Schedule.parse(json.loads(json.dumps(dict(schedule.keep))), num_layers) == schedule
    if isinstance(value, dict):
        assert len(schedule.keep) == len(value)
    assert Lazy(schedule).tokens_per_layer(num_layers, 1) == [1] * num_layers  # one token cannot get fewer


@given(KEEPS, st.integers(1, 100_000))
def test_tokens_enter_layers_as_decimal_numbers_say(keep: dict[int, float], n: int) -> None:
    counts = Lazy(keep).tokens_per_layer(100, n)
    for layer in range(1, 101):
        assert counts[layer - 1] == n
        if layer in keep:
            n = decimal_keep(keep[layer], n)
        assert n >= 1
