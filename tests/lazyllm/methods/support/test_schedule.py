import json
from decimal import ROUND_CEILING, Decimal
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import LlamaConfig

from lazyllm import Schedule
from lazyllm.engine.depth import Depth
from lazyllm.methods import Lazy

LLAMA2_7B = LlamaConfig()  # whose defaults are the 7B shape


@pytest.mark.parametrize(
    ("count", "layers"),
    # Figure 7 names the groups 1-9, 10-19, 20-28, 29-32
    [
        (1, []),
        (2, [1]),
        (3, [1, 2]),
        (4, [1, 2, 3]),
        (8, [2, 4, 7]),
        (16, [4, 9, 14]),
        (32, [9, 19, 28]),
    ],
)
def test_figure_4_by_depth(count: int, layers: list[int]) -> None:
    assert Schedule.paper(Depth(count)).keep == dict.fromkeys(layers, 0.7)


@pytest.mark.parametrize(
    ("keep", "error"),
    [
        ({0: 0.5}, "count from 1"),
        ({-2: 0.5}, "count from 1"),
        ({3: 0}, r"\(0, 1\]"),
        ({3: 1.01}, r"\(0, 1\]"),
        ({3: float("nan")}, r"\(0, 1\]"),
        ({3: "0.5"}, "number"),
        ({3: True}, "number"),
        ({"three": 0.5}, "whole number"),
        ({2.5: 0.5}, "whole number"),
        ({3: 0.5, "3": 0.7}, "twice"),
        ([3, 0.5], "mapping"),
    ],
)
def test_schedule_refuses_bad_entries(keep, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        Schedule(keep)


def test_parse() -> None:
    assert Schedule.parse("paper", Depth(32)) == Schedule.paper(Depth(32))
    assert Schedule.parse("none", Depth(32)) == Schedule({})
    assert Schedule.parse({"9": 0.7, "2": 0.5}, Depth(32)) == Schedule({2: 0.5, 9: 0.7})
    assert Schedule.parse({"12.5%": 0.5, "50 %": 0.7, 30: 0.9}, Depth(32)) == Schedule(
        {4: 0.5, 16: 0.7, 30: 0.9}
    )
    assert Schedule.parse({"30%": 0.5}, Depth(8)) == Schedule({2: 0.5})  # 2.4, rounded down
    for text in (
        "{2: 0.5, 9: 0.7}",
        '{"2": 0.5, "9": 0.7}',
        "2:0.5+9:0.7",
        " 9:0.7 + 2:0.5 ",
        "{12.5%: 0.7, 2: 0.5}",
    ):
        expected = {2: 0.5, (9 if "9" in text else 4): 0.7}
        assert Schedule.parse(text, Depth(32)) == Schedule(expected)
    for text in ("papr", "2:", ":0.5", "2:half", "2:0.5+2:0.7", "{}", "2=0.5:"):
        with pytest.raises(
            ValueError, match=r"schedule .*: expected 'paper', 'none', or a keep ratio"
        ):
            Schedule.parse(text, Depth(8))
    shares = dict.fromkeys(("half%", "1/0%", "101%", "0%", "-10%"), "like 50%") | {
        "1%": "count from 1"
    }
    for bad, message in shares.items():
        with pytest.raises(ValueError, match=message):
            Schedule.parse({bad: 0.5}, Depth(32))
    with pytest.raises(ValueError, match="are the same of 8 layers"):
        Schedule.parse({"30%": 0.5, 2: 0.7}, Depth(8))
    with pytest.raises(ValueError, match="after layer 9, but the model has only 8 layers"):
        Schedule.parse({9: 0.7}, Depth(8))


def test_ideal_speedup_by_hand() -> None:
    def layer(n: int) -> int:
        return n * 2 * (4 * 4096**2 + 3 * 4096 * 11008) + n * (n + 1) // 2 * 4 * 4096

    logits = 2 * 4096 * 32000
    full = 32 * layer(1000) + logits
    pruned = 9 * layer(1000) + 10 * layer(700) + 9 * layer(490) + 4 * layer(343) + logits
    assert Lazy(Schedule.paper(Depth(32))).ideal_speedup(LLAMA2_7B, 1000) == pytest.approx(
        full / pruned, rel=1e-12
    )
    assert Lazy({}).ideal_speedup(LLAMA2_7B, 1000) == 1


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
ANY_RATIOS = st.one_of(
    RATIOS, st.floats(), st.integers(), st.text(max_size=4), st.booleans(), st.none()
)
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
    assert Schedule.parse(override.value(), Depth(100)) == Schedule(keep)  # type: ignore[arg-type]


@given(ANYTHING, DEPTHS)
@example({"1e999999999%": 0.5}, 8)
@example({"1e-999999999%": 0.5}, 8)
@example({"9" * 5000: 0.5}, 8)
@example({"9" * 5000 + "%": 0.5}, 8)
@example({1: 10**400}, 8)
@example({"１": 0.5}, 8)
def test_other_values_are_refused(value: Any, count: int) -> None:
    try:
        schedule = Schedule.parse(value, Depth(count))
    except (ValueError, TypeError) as error:
        message = str(error)
        assert message
        return
    assert all(type(layer) is int and 1 <= layer <= count for layer in schedule.keep)
    assert all(type(ratio) is float and 0 < ratio <= 1 for ratio in schedule.keep.values())
    assert list(schedule.keep) == sorted(schedule.keep)
    assert Schedule.parse(json.loads(json.dumps(dict(schedule.keep))), Depth(count)) == schedule
    if isinstance(value, dict):
        assert len(schedule.keep) == len(value)
    # one token cannot get fewer
    assert Lazy(schedule).tokens_per_layer(Depth(count), 1) == [1] * count


@given(KEEPS, st.integers(1, 100_000))
@example({1: 0.7}, 10)
@example({1: 0.07}, 100)
@example({1: 0.29}, 100)
@example({1: 0.01}, 5)
def test_tokens_enter_layers_as_decimal_numbers_say(keep: dict[int, float], n: int) -> None:
    counts = Lazy(keep).tokens_per_layer(Depth(100), n)
    for layer in range(1, 101):
        assert counts[layer - 1] == n
        if layer in keep:
            n = decimal_keep(keep[layer], n)
        assert n >= 1


def test_methods_with_equal_schedules_are_equal_and_hashable() -> None:
    assert len({Schedule({1: 0.5, 2: 0.7}), Schedule({2: 0.7, "1": 0.5})}) == 1  # type: ignore[dict-item]
    same = {Lazy({2: 0.5}), Lazy(Schedule({2: 0.5})), Lazy({"2": 0.5})}
    assert same == {Lazy({2: 0.5})}
    assert len({Lazy({"50%": 0.7, 3: 0.5}), Lazy({"50%": 0.7, 3: 0.5}), Lazy({"50%": 0.7})}) == 2
    assert Lazy({"50%": 0.7}).kept(Depth(8), 10) == {4: 7}
