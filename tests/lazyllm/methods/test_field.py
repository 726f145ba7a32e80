"""The field's methods against their slow oracles (`tests/field_oracles.py`): selections, tokens,
logits, caches.
"""

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

import lazyllm
from lazyllm.engine.decoder import open_decoder
from lazyllm.engine.depth import Depth
from lazyllm.engine.flops import LayerShape, causal_pairs, prefill_flops, windows_of
from lazyllm.engine.inputs import Prompt
from lazyllm.engine.method import warn_once
from lazyllm.methods import (
    ASL,
    CLAA,
    METHODS,
    FastKV,
    GemFilter,
    Method,
    PyramidInfer,
    Sparse,
    SpecPrefill,
    TriangleMix,
    UniPrefill,
)
from tests import field_oracles
from tests.helpers import TOLERANCE, slow
from tests.lazyllm.engine.architecture_matrix import answer_of
from tests.reference import attention_of, casts_in_float64, random_variant

VARIANTS = ["llama", "mistral, window", "qwen2", "qwen3", "gemma2", "llama, dynamic NTK"]
STEPS = 4
LAYERS = 5
SEEDS = [0, *slow(1, 2, 3)]


@cache
def model_of(variant: str, seed: int, attention: str) -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    more: dict[str, Any] = {"layer_types": kinds} if variant == "gemma2" else {}
    return random_variant(variant, seed, attention, num_hidden_layers=LAYERS, **more)


LAYER = range(1, LAYERS + 1)
SHARES = [0.1, 0.29, 0.5, 0.8, 1.0]
# {name of a method and of its oracle: the values of its hyperparameters to draw from}
CASES: dict[str, dict[str, Sequence[Any]]] = {
    "gemfilter": {
        "layer": LAYER, "keep": [0.1, 0.35, 0.7, 1.0, 1, 4, 11, 1024], "pool": [1, 3, 5, 13],
        "sound": [False, True],
        "window": [1, 3, 8],
    },
    "fastkv": {
        "layer": LAYER, "keep": SHARES, "retain": [0.05, 0.1, 0.3, 0.6, 1, 1.0],
        "window": [1, 2, 5, 8],
        "pool": [1, 3, 7], "pooling": ["max", "average"],
    },
    "claa": {
        "layer": LAYER, "keep": SHARES, "layers": [1, 2, 3, 4], "window": [1, 2, 5, 8],
        "pool": [1, 3, 7],
        "retain": [None, None, 1],
    },
    "pyramidinfer": {
        "recent": [0.01, 0.2, 0.5], "decay": [0.2, 0.5, 0.9, 1.0], "weight": [1.2, 1, 3.0],
        "first": [0, 1, 4],
    },
    "asl": {
        "first": LAYER, "threshold": [0.3, 0.7, 0.95, 2.0], "keep": [3, 7, 0.2, 0.4, 1.0, 100],
        "window": [1, 3, 8],
        "layers": [1, 2, 2, 3], "pool": [1, 3, 7], "retain": [None, 5, 0.3, 1],
    },
    "uniprefill": {
        "layers": [cuts for count in (1, 2, 3) for cuts in combinations(LAYER, count)],
        "p": [0.1, 0.5, 0.8, 0.99, 1.0],
        "window": [1, 3, 8, 40], "block": [1, 2, 5], "first": [0, 1, 4], "last": [1, 2, 6],
    },
    "promptdistill": {
        "layers": [*([cut, LAYERS] for cut in LAYER[:-1]), [1, 3]],
        "keep": [[0.35, 0.1], [0.7, 4], [9, 3], [1.0, 0.5], [1, 1]],
        "pool": [1, 3, 5, 13], "forget": [True, False],
    },
    "trianglemix": {
        "dense": [0, 1, 0.5, 4, 1.0], "sinks": [0, 1, 3], "window": [1, 2, 5, 9], "last": [1, 2, 5],
    },
    "static_pruning": {"layer": LAYER, "keep": SHARES},
    "specprefill": {
        "keep": [0.1, 0.3, 0.6, 1.0], "lookahead": [1, 2, 5], "chunk": [1, 2, 5, 32],
        "pool": [1, 3, 13],
        "sound": [False, True],
    },
}  # fmt: skip


def drawn(rng: random.Random, name: str) -> dict[str, Any]:
    return {key: rng.choice(values) for key, values in CASES[name].items()}


def drawn_prompt(rng: random.Random) -> list[int]:
    return rng.choices(range(97), k=rng.choice([1, 2, 3, 6, 9, 14, 21, 33]))


def hold(
    model: PreTrainedModel, method: Method, ids: list[int], expected: field_oracles.FieldOutput
) -> lazyllm.Generation:
    """Raise AssertionError if the method differs from its oracle. In float64 throughout."""
    out, logits = answer_of(model, method, ids, STEPS)
    assert out.selected[0] == expected.selected
    assert out.token_ids == expected.token_ids
    assert out.computed[0].tolist() == expected.passes[-1]
    np.testing.assert_allclose(logits, expected.logits, rtol=0, atol=TOLERANCE)
    config = model.config
    held = sum(
        len(positions) + STEPS - 1 for heads in expected.caches.values() for positions in heads
    )
    assert out.kv_bytes == held * 2 * config.head_dim * 8
    if expected.pairs:
        dense = [
            config.num_attention_heads * causal_pairs(len(ids), window)
            for window in windows_of(config)
        ]
        assert isinstance(method, Sparse)
        assert dict(enumerate(dense, start=1)) | method.attended(config, len(ids)) == expected.pairs
    return out


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [name for name in CASES if name != "specprefill"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_cases(name: str, variant: str, seed: int) -> None:
    rng = random.Random(f"{name} {variant} {seed}")
    attention = rng.choice(["eager", attention_of(variant)])
    model, ids = model_of(variant, seed % 2, attention), drawn_prompt(rng)
    parameters = drawn(rng, name)
    expected = getattr(field_oracles, name)(model, ids, **parameters, steps=STEPS)
    assert expected.margin > 1e-12
    with casts_in_float64():
        out = hold(model, METHODS[name](**parameters), ids, expected)
    if len(expected.passes) == 2 and expected.decode_from < len(ids):
        assert out.scoring_tokens == -(-sum(expected.passes[0]) // LAYERS)


@pytest.mark.parametrize("seed", slow(*range(40)))
@pytest.mark.parametrize("name", ["promptdistill", "trianglemix"])
def test_llamas_with_grouped_heads(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    kv_heads = rng.choice([1, 2, 4])
    heads = {"num_key_value_heads": kv_heads, "num_attention_heads": kv_heads * rng.choice([2, 4])}
    model = random_variant(
        "llama", seed, rng.choice(["sdpa", "eager"]), num_hidden_layers=LAYERS, **heads
    )
    ids, parameters = rng.choices(range(97), k=rng.randint(20, 45)), drawn(rng, name)
    expected = getattr(field_oracles, name)(model, ids, **parameters, steps=STEPS)
    assert expected.margin > 1e-12
    with casts_in_float64():
        hold(model, METHODS[name](**parameters), ids, expected)


def test_trianglemix_without_a_dense_layer() -> None:
    parameters: dict[str, Any] = {"dense": 0, "sinks": 1, "window": 3, "last": 2}
    model, ids = model_of("llama", 0, "sdpa"), [*range(5, 38)]
    expected = field_oracles.trianglemix(model, ids, **parameters, steps=STEPS)
    assert len(set(expected.pairs.values())) == 1  # the first layer skips as many pairs as the last
    with casts_in_float64():
        hold(model, METHODS["trianglemix"](**parameters), ids, expected)
    assert list(TriangleMix(**parameters).attended(model.config, len(ids))) == list(LAYER)


@pytest.mark.parametrize(("layer", "layers"), [(3, 1), (4, 2)])
def test_first_layers_of_claa_store_all_before_those_that_store_some(
    layer: int, layers: int
) -> None:
    parameters: dict[str, Any] = {
        "layer": layer,
        "keep": 0.3,
        "layers": layers,
        "window": 2,
        "pool": 3,
    }
    model, ids = model_of("llama", 0, "sdpa"), [*range(5, 38)]
    expected = field_oracles.claa(model, ids, **parameters, retain=None, steps=STEPS)
    assert [len(expected.caches[number][0]) for number in range(1, layers + 2)] == [33] * layers + [
        9
    ]
    with casts_in_float64():
        hold(model, METHODS["claa"](**parameters), ids, expected)


@cache
def saved_draft(variant: str, folder: Path) -> str:
    where = folder / variant.replace(", ", "-").replace(" ", "-")
    random_variant(variant, 7, attention_of(variant), num_hidden_layers=2).save_pretrained(where)
    return str(where)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


# SDPA, as drafts are loaded
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "gemma2"])
@pytest.mark.parametrize("seed", SEEDS)
def test_specprefill(variant: str, seed: int, drafts: Path) -> None:
    rng = random.Random(f"{variant} {seed}")
    ids, model = drawn_prompt(rng), model_of(variant, seed % 2, attention_of(variant))
    parameters = drawn(rng, "specprefill")
    with casts_in_float64():
        folder = saved_draft(variant, drafts)
        draft = random_variant(variant, 7, attention_of(variant), num_hidden_layers=2)
        method = SpecPrefill(folder, **parameters)
        method.check(model.config)
        expected = field_oracles.specprefill(model, draft, ids, **parameters, steps=STEPS)
        assert expected.margin > 1e-12
        out = hold(model, method, ids, expected)
        if len(expected.selected[0]) < len(ids):
            assert out.scoring_tokens == len(ids) + parameters["lookahead"] - 1
        own_draft = field_oracles.specprefill(model, model, ids, **parameters, steps=STEPS)
        hold(model, SpecPrefill(None, **parameters), ids, own_draft)


def test_asl_cuts_where_ranks_settle() -> None:
    """Some random cases are cut early, some late and some never."""
    model = random_variant("llama", 0, num_hidden_layers=8)
    rng = random.Random(0)
    cuts = set()
    for _ in range(6):
        ids = rng.choices(range(97), k=40)
        parameters: dict[str, Any] = {
            "first": 2,
            "threshold": 0.9,
            "keep": 6,
            "window": 4,
            "layers": 2,
            "pool": 3,
        }
        expected = field_oracles.asl(model, ids, **parameters, steps=STEPS)
        with casts_in_float64():
            out = hold(model, ASL(**parameters), ids, expected)
        measured = ASL(**parameters).ideal_speedup(model.config, len(ids), out.computed[0])
        assert measured == prefill_flops(model.config, [40] * 8) / prefill_flops(
            model.config, expected.passes[0]
        )
        cuts.add(next(iter(expected.selected), None))
    assert len(cuts) >= 3
    announced = ASL(**parameters).tokens_per_layer(Depth(8), 40).count(40)
    assert announced == min(filter(None, cuts))  # the earliest


def test_flops_of_selection_are_those_announced() -> None:
    """PyTorch's own counter, over the linear maps of what runs before and in a prefill."""
    keys = torch.ones(1, 2, 8, 4)
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(
            torch.ones(1, 4, 8, 4), keys, keys, is_causal=True, enable_gqa=True
        )
    if counter.get_total_flops():
        pytest.skip("this torch counts attention on a CPU as products of matrices")
    model, n = random_variant("llama", 0), 400
    shape = LayerShape.of(model.config)
    ids = torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(0))
    for method in (
        GemFilter(3, 0.25),
        SpecPrefill(None, 0.25, chunk=8, lookahead=4),
        FastKV(2),
        CLAA(3),
        PyramidInfer(),
        UniPrefill(p=0.5),
    ):
        with (
            torch.inference_mode(),
            open_decoder(model) as decoder,
            FlopCounterMode(display=False) as counter,
        ):
            session = method.start(decoder, Prompt(ids), 1)
            session.prefill(ids)
        counted = sum(
            flops
            for name, flops in counter.get_flop_counts()["Global"].items()
            if "attention" not in str(name)
        )
        tokens = [int(count) for count in session.computed[0]]
        announced = method.first_token_flops(model.config, n, tokens)
        if not isinstance(method, UniPrefill):  # its number of tokens depends on the prompt
            assert announced == prefill_flops(model.config, tokens) + method.scoring_flops(
                model.config, n
            )
        pairs = sum(m * (m + 1) // 2 for m in tokens)
        if isinstance(method, GemFilter):
            pairs += 2 * n * (n + 1) // 2  # layers 1 and 2; of layer 3 no attention runs
        if isinstance(method, SpecPrefill):
            pairs += 4 * (n + 3) * (n + 4) // 2
        assert counted == pytest.approx(announced - pairs * shape.pair_flops, rel=0.05)


def test_uniprefill_counts_the_scores_of_the_tokens_that_ran() -> None:
    config = random_variant("llama", 0).config
    method = UniPrefill(layers=[1, 2, 3], window=4, block=1, first=0, last=1)
    # queries times keys, less those after a query: 4 queries of 40, of 10 and of 5 tokens, and 2 of
    # 2
    for computed, pairs in (
        ([40, 10, 5, 5], 4 * 40 - 6 + 4 * 10 - 6 + 4 * 5 - 6),
        ([40, 2, 2, 2], 154 + 3 + 3),
    ):
        scores = 2 * config.num_attention_heads * config.head_dim * pairs
        assert (
            method.first_token_flops(config, 40, computed)
            == prefill_flops(config, computed) + scores
        )


def test_specprefill_without_a_draft_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    config = model_of("llama", 0, "sdpa").config
    for method in (SpecPrefill(), SpecPrefill(keep=0.5)):
        method.check(config)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "specprefill has no draft"
    ]
