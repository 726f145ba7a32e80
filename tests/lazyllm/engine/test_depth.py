"""A model's layers as methods see them (`Depth`): by hand, and against a slow restatement on
random windows.
"""

import random
from fractions import Fraction
from types import SimpleNamespace

import pytest

from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError
from tests.helpers import slow

W = 512
GEMMA_LIKE = Depth(8, (W, W, None, W, W, W, None, W))  # layers 3 and 7 see the whole prompt


def test_layers_of_a_model_with_windows_by_hand() -> None:
    assert [*GEMMA_LIKE.full] == [3, 7]
    assert [GEMMA_LIKE.window(layer) for layer in (1, 3, 8)] == [W, None, W]
    assert [GEMMA_LIKE.nearest(layer) for layer in range(1, 9)] == [3, 3, 3, 3, 3, 3, 7, 7]
    assert GEMMA_LIKE.nearest(9) == 9  # beyond the model, for others to refuse
    # 0.8 of 8 is layer 6, after which 7 comes
    shares = {"0.1": 0, "0.2": 3, "0.5": 3, "0.8": 3, "0.9": 7, "1": 7}
    assert {share: GEMMA_LIKE.at_share(Fraction(share)) for share in shares} == shares
    assert GEMMA_LIKE.among([2, 3, 4, 7]) == [3, 7]
    assert GEMMA_LIKE.among([4, 5]) == [4, 5]  # a choice of the user's
    assert GEMMA_LIKE.among([]) == []


@pytest.mark.parametrize("windows", [(), (W,) * 8])
def test_plain_rule_holds_where_no_layer_is_better(windows: tuple[int, ...]) -> None:
    depth = Depth(8, windows)
    assert [*depth.full] == [*range(1, 9)]
    assert [depth.nearest(layer) for layer in range(1, 9)] == [*range(1, 9)]
    assert [depth.at_share(Fraction(tenths, 10)) for tenths in range(11)] == [
        0,
        0,
        1,
        2,
        3,
        4,
        4,
        5,
        6,
        7,
        8,
    ]
    assert depth.among(range(2, 5)) == [2, 3, 4]


@pytest.mark.parametrize("seed", [*range(20), *slow(*range(20, 200))])
def test_random_windows(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    windows = tuple(rng.choice([None, W]) if rng.random() < 0.6 else W for _ in range(count))
    depth = Depth(count, windows)
    seeing = {number for number in range(1, count + 1) if windows[number - 1] is None}
    for percent in range(101):
        plain = count * percent // 100
        up_to = {number for number in seeing if number <= plain}
        expected = max(up_to) if up_to else min(seeing) if seeing else plain
        assert depth.at_share(Fraction(percent, 100)) == (expected if plain else 0)
    chosen = sorted(rng.sample(range(1, count + 1), rng.randint(1, count)))
    assert {*depth.among(chosen)} == (seeing & {*chosen} or {*chosen})


def test_depth_is_read_from_a_config() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    about = {"num_hidden_layers": 3, "model_type": "own"}
    assert Depth.of(SimpleNamespace(**about)) == Depth(3)
    assert Depth.of(SimpleNamespace(**about, sliding_window=None)) == Depth(3)
    assert Depth.of(SimpleNamespace(**about, sliding_window=7)) == Depth(3, (7, 7, 7))
    assert Depth.of(SimpleNamespace(**about, sliding_window=7, layer_types=kinds)) == Depth(
        3, (7, None, 7)
    )
    assert Depth.of(
        SimpleNamespace(**about, sliding_window=7, layer_types=["full_attention"] * 3)
    ) == Depth(3)
    for positions, windows in (
        (8, (7, 7, 7)),
        (7, ()),
        (6, ()),
    ):  # no text is longer than the window
        read = Depth.of(
            SimpleNamespace(**about, sliding_window=7, max_position_embeddings=positions)
        )
        assert read == Depth(3, windows)
    with pytest.raises(
        UserError, match="own is not supported: its config has layers of type linear_attention"
    ):
        Depth.of(SimpleNamespace(**about, layer_types=["linear_attention"] * 3))


def test_depth_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="a model of 0 layers: give 1 or more"):
        Depth(0)
    with pytest.raises(ValueError, match="2 windows of 3 layers: give one for each, or none"):
        Depth(3, (W, None))
