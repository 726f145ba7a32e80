"""Models with sliding windows: methods score and drop tokens where the whole prompt is seen.

Layers are written by hand from the real patterns of `layer_types`, FLOPs are counted pair by pair, and a token that
lies outside every window, but that all full-attention layers attend to, survives every method.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import ceil
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

import lazyllm
from lazyllm.engine import method as engine_method
from lazyllm.engine.depth import Depth
from lazyllm.methods import (
    ASL,
    CLAA,
    METHODS,
    FastKV,
    GemFilter,
    Lazy,
    Method,
    PromptDistill,
    Prune,
    PyramidInfer,
    SpecPrefill,
    StaticPruning,
    TriangleMix,
    UniPrefill,
)
from lazyllm.methods.support.schedule import Schedule
from tests.helpers import VOCABULARY, slow
from tests.reference import casts_in_float64, random_model

ALL_32 = [*range(1, 33)]
EVERY_FOURTH = [4, 8, 12, 16, 20, 24, 28, 32]


@dataclass(frozen=True)
class Pattern:
    """A checkpoint's layers, as its config describes them, and what follows from them by hand.

    settings: of the config. windows: of each layer. n: tokens of a prompt that is longer than the window.
    paper: layers after which `schedule: paper` prunes; a solved speedup too. static: the layer after which static
    pruning prunes. averaged: the layers whose importance it averages.
    """

    model_type: str
    settings: dict[str, Any]
    windows: list[int | None]
    n: int
    paper: list[int]
    static: int
    averaged: list[int]
    gemfilter: int
    fastkv: int
    claa: list[int]
    asl: list[int]
    uniprefill: list[int]
    promptdistill: int
    pyramidinfer: list[int]


def sizes(layers: int, width: int, mlp: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers, "hidden_size": width, "intermediate_size": mlp, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
    }  # fmt: skip


_7B = sizes(32, 4096, 11008, 32, 32, 128, 100352)
_PLAIN_32: dict[str, Any] = {
    "paper": [9, 19, 28], "static": 2, "averaged": [1, 2], "gemfilter": 14, "fastkv": 16, "claa": [13, 14, 15, 16],
    "asl": [*range(11, 32)], "uniprefill": [8, 12, 16, 20, 24, 28], "promptdistill": 14,
    "pyramidinfer": [*range(1, 32)],
}  # fmt: skip
_EVERY_FOURTH: dict[str, Any] = {  # of 32 layers; 30, 60 and 90 % of them are 9, 19 and 28
    "windows": [4096, 4096, 4096, None] * 8, "n": 6000, "paper": [8, 16, 28], "static": 4, "averaged": [4],
    "gemfilter": 12, "fastkv": 16, "claa": [16], "asl": [8, 12, 16, 20, 24, 28],
    "uniprefill": [8, 12, 16, 20, 24, 28], "promptdistill": 12, "pyramidinfer": EVERY_FOURTH[:-1],
}  # fmt: skip
PATTERNS = {
    "gemma 3 270m": Pattern(
        "gemma3_text",
        sizes(18, 640, 2048, 4, 1, 256, 262144) | {"sliding_window": 512},
        [512, 512, 512, 512, 512, None] * 3,
        1000,
        paper=[6, 12],  # 5, 10 and 16: the first full layer for 5, the one before for 10 and 16
        static=6,
        averaged=[6],
        gemfilter=6,
        fastkv=6,
        claa=[6],
        asl=[6, 12],
        uniprefill=[6, 12],
        promptdistill=6,
        pyramidinfer=[6, 12],
    ),
    "gpt-oss 20b": Pattern(
        "gpt_oss",
        sizes(24, 2880, 2880, 64, 8, 64, 201088) | {"sliding_window": 128},
        [128, None] * 12,
        1000,
        paper=[6, 14, 20],  # 7, 14 and 21
        static=2,
        averaged=[2],
        gemfilter=10,
        fastkv=12,
        claa=[10, 12],
        asl=[8, 10, 12, 14, 16, 18, 20, 22],
        uniprefill=[6, 8, 12, 14, 18, 20],  # 6, 9, 12, 15, 18 and 21
        promptdistill=10,
        pyramidinfer=[2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22],
    ),
    "mistral 7b v0.1": Pattern(
        "mistral",
        sizes(32, 4096, 14336, 32, 8, 128, 32000) | {"sliding_window": 4096},
        [4096] * 32,
        6000,
        **_PLAIN_32,
    ),
    "mistral 7b v0.3": Pattern(
        "mistral",
        sizes(32, 4096, 14336, 32, 8, 128, 32768) | {"sliding_window": None},
        [None] * 32,
        6000,
        **_PLAIN_32,
    ),
    "qwen2 with windows": Pattern(
        "qwen2",
        sizes(28, 3584, 18944, 28, 4, 128, 152064)
        | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21},
        [None] * 21 + [4096] * 7,
        6000,
        paper=[8, 16, 21],  # 8, 16 and 25
        static=2,
        averaged=[1, 2],
        gemfilter=12,
        fastkv=14,
        claa=[11, 12, 13, 14],
        asl=[*range(9, 22)],
        uniprefill=[7, 10, 14, 17, 21],  # 7, 10, 14, 17, 21 and 24
        promptdistill=12,
        pyramidinfer=[*range(1, 22)],
    ),
    "olmo 3 7b": Pattern("olmo3", _7B | {"sliding_window": 4096, "max_position_embeddings": 65536}, **_EVERY_FOURTH),
    "cohere 2 (command r7b)": Pattern(
        "cohere2", sizes(32, 4096, 14336, 32, 8, 128, 256000) | {"sliding_window": 4096}, **_EVERY_FOURTH
    ),
}
ROWS = pytest.mark.parametrize("row", PATTERNS.values(), ids=[*PATTERNS])


def config_of(row: Pattern) -> Any:
    return AutoConfig.for_model(row.model_type, **row.settings)


def counted_flops(row: Pattern, tokens: Sequence[int]) -> int:
    """FLOPs of a prefill, query by query: linear maps, products with K and V in sight, one row of logits."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    width, mlp, heads, kv_heads, head_dim, vocab = (row.settings[name] for name in names)
    elements = 2 * width * heads * head_dim + 2 * width * kv_heads * head_dim + 3 * width * mlp
    total = 2 * width * vocab
    for m, window in zip(tokens, row.windows, strict=True):
        for query in range(m):
            in_sight = query + 1 if window is None else min(query + 1, window)
            total += 2 * elements + 4 * heads * head_dim * in_sight
    return total


def tokens_after(row: Pattern, keep: dict[int, float]) -> list[int]:
    """The tokens that enter each layer if the share `keep[layer]` of them goes on after a layer."""
    tokens, m = [], row.n
    for layer in range(1, len(row.windows) + 1):
        tokens.append(m)
        m = ceil(Fraction(str(keep.get(layer, 1))) * m)
    return tokens


def counted_speedup(row: Pattern, keep: dict[int, float]) -> float:
    return counted_flops(row, [row.n] * len(row.windows)) / counted_flops(row, tokens_after(row, keep))


def nearest_of_three(row: Pattern, keep: dict[int, float], target: float) -> bool:
    """Whether no ratio 0.0001 above or below gives a speedup nearer to the target, counted by hand."""
    distances = []
    for step in (-1, 0, 1):
        moved = {layer: round(ratio + step / 10_000, 4) for layer, ratio in keep.items()}
        distances.append(abs(counted_speedup(row, moved) - target))
    return distances[1] == min(distances)


@ROWS
def test_windows_are_those_of_the_config(row: Pattern) -> None:
    depth = Depth.of(config_of(row))
    assert [depth.window(layer) for layer in range(1, depth.count + 1)] == row.windows


@ROWS
def test_lazyllm_prunes_where_the_whole_prompt_is_seen(row: Pattern) -> None:
    config = config_of(row)
    depth = Depth.of(config)
    assert Schedule.parse("paper", depth) == Schedule(dict.fromkeys(row.paper, 0.7))
    assert [*Lazy().scoring_layers(depth)] == row.paper
    assert Lazy().tokens_per_layer(depth, row.n) == tokens_after(row, dict.fromkeys(row.paper, 0.7))
    expected = counted_speedup(row, dict.fromkeys(row.paper, 0.7))
    assert Lazy().ideal_speedup(config, row.n) == pytest.approx(expected, rel=1e-12)

    found = Lazy.solve({}, config, row.n, 1.5)
    assert found is not None
    assert [*found] == row.paper
    assert len({*found.values()}) == 1
    assert counted_speedup(row, found) == pytest.approx(1.5, abs=0.002)
    assert nearest_of_three(row, found, 1.5)


@ROWS
def test_static_pruning_averages_and_prunes_where_the_whole_prompt_is_seen(row: Pattern) -> None:
    config = config_of(row)
    depth = Depth.of(config)
    assert StaticPruning().resolve({"keep": 0.3}, depth) == {"layer": row.static, "keep": 0.3}
    assert StaticPruning().scoring_layers(depth) == row.averaged
    first = StaticPruning().groups(depth, row.n)[0]
    assert [*first.layers] == [*range(row.static)]
    assert first.scores is not None
    assert [*first.scores.layers] == [layer - 1 for layer in row.averaged]
    assert StaticPruning().tokens_per_layer(depth, row.n) == tokens_after(row, {row.static: 0.3})
    keep = StaticPruning.solve({}, config, row.n, 1.5)
    assert counted_speedup(row, {row.static: keep}) == pytest.approx(1.5, abs=0.002)
    assert nearest_of_three(row, {row.static: keep}, 1.5)


@ROWS
def test_other_methods_choose_layers_that_see_the_whole_prompt(row: Pattern) -> None:
    depth = Depth.of(config_of(row))
    assert GemFilter().selected_at(depth) == row.gemfilter
    assert FastKV().cut_after(depth) == CLAA().cut_after(depth) == row.fastkv
    assert CLAA().scoring_layers(depth) == row.claa
    assert ASL().scoring_layers(depth) == row.asl
    assert UniPrefill().pruning_layers(depth) == row.uniprefill
    assert [*PromptDistill().kept(depth, row.n)] == [row.promptdistill]
    assert PyramidInfer().pruning_layers(depth) == row.pyramidinfer
    seeing = [layer for layer, window in enumerate(row.windows, start=1) if window is None]
    assert [*SpecPrefill().scoring_layers(depth)] == (seeing or ALL_32)


def test_asl_counts_the_layers_that_it_ranks() -> None:
    """A variance is over max(2, layers that see everything // 4): 3 of gpt-oss's 12, 8 of 32, 2 of Gemma's 3."""
    after = {  # the layer before which nothing is dropped, for a threshold that the first variance meets, or does not
        "gpt-oss 20b": (12, 14), "mistral 7b v0.3": (18, 19), "olmo 3 7b": (12, 16), "gemma 3 270m": (12, None),
    }  # fmt: skip
    for name, (met, unmet) in after.items():
        depth = Depth.of(config_of(PATTERNS[name]))
        for threshold, cut in ((2.0, met), (0.3, unmet)):
            tokens = ASL(threshold=threshold, keep=100, window=8, retain=1).tokens_per_layer(depth, 1000)
            assert tokens == [1000] * (cut or depth.count) + [108] * (depth.count - (cut or depth.count))


def test_pyramidinfer_drops_at_once_what_the_layers_with_windows_would_have_dropped() -> None:
    depth, plain = Depth.of(config_of(PATTERNS["gemma 3 270m"])), Depth(18)
    step_by_step = PyramidInfer().tokens_per_layer(plain, 1000)
    found = PyramidInfer().tokens_per_layer(depth, 1000)
    assert found == [1000] * 6 + [step_by_step[6]] * 6 + [step_by_step[12]] * 6


# --- What a user gives by number is obeyed, with a line ---


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    engine_method.warn_once.cache_clear()
    caplog.set_level(logging.WARNING, logger=engine_method.__name__)
    return caplog


def about_windows(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "scores say nothing" in record.message]


BY_NUMBER: list[tuple[Method, str]] = [
    (Lazy({5: 0.5}), "LazyLLM: layer 5"),
    (Lazy({5: 0.5, 6: 0.5, 10: 0.7}), "LazyLLM: each of layers 5, 10"),
    (StaticPruning(2), "static pruning: each of layers 1, 2"),
    (GemFilter(7), "GemFilter: layer 7"),
    (FastKV(9), "FastKV: layer 9"),
    (CLAA(11), "CLAA: each of layers 8, 9, 10, 11"),
    (ASL(first=13), "ASL: each of layers 13, 14, 15, 16, 17"),
    (UniPrefill([6, 8]), "UniPrefill: layer 8"),
    (PromptDistill(layers=[6, 8], keep=0.3), "PromptDistill: layer 8"),
]


@pytest.mark.parametrize(("method", "who"), BY_NUMBER, ids=[who for _, who in BY_NUMBER])
def test_layer_with_a_window_is_obeyed_and_named_once(
    method: Method, who: str, lines: pytest.LogCaptureFixture
) -> None:
    config = config_of(PATTERNS["gemma 3 270m"])
    method.check(config)
    method.check(config)
    assert about_windows(lines) == [
        f"{who} of gemma3_text sees 512 tokens, so its scores say nothing of what lies outside; full-attention layers "
        "are 6, 12, 18"
    ]


def test_layers_that_see_everything_among_those_with_windows_score_without_a_line(
    lines: pytest.LogCaptureFixture,
) -> None:
    """Pruning after a layer with a window is no fault if others score."""
    depth = Depth.of(config_of(PATTERNS["gemma 3 270m"]))
    for method, scoring in ((StaticPruning(8), [6]), (CLAA(8), [6]), (ASL(first=5), [6, 12])):
        method.check(config_of(PATTERNS["gemma 3 270m"]))
        assert method.scoring_layers(depth) == scoring
    assert StaticPruning(8, 0.5).tokens_per_layer(depth, 10) == [10] * 8 + [5] * 10
    assert about_windows(lines) == []


DEFAULTS = [kind() for name, kind in METHODS.items() if name != "prompt_compression"]
SCORE_BY_ATTENTION = {
    *("LazyLLM", "static pruning", "GemFilter", "FastKV", "CLAA", "ASL", "UniPrefill", "PromptDistill"),
    *("PyramidInfer", "SpecPrefill"),
}


@pytest.mark.parametrize("method", DEFAULTS, ids=lambda method: method.label)
def test_defaults_are_blind_only_where_every_layer_is(method: Method, lines: pytest.LogCaptureFixture) -> None:
    for name, row in PATTERNS.items():
        if name != "mistral 7b v0.1":
            method.check(config_of(row))
    assert about_windows(lines) == []
    method.check(config_of(PATTERNS["mistral 7b v0.1"]))
    method.check(config_of(PATTERNS["mistral 7b v0.1"]))
    expected = [
        f"{method.label}: every layer of mistral sees 4096 tokens, so its scores say nothing of what lies outside"
    ]
    assert about_windows(lines) == expected * (method.label in SCORE_BY_ATTENTION)


def test_line_comes_at_a_generation(lines: pytest.LogCaptureFixture) -> None:
    model = windowed("gemma3_text", 0)
    for _ in range(2):
        lazyllm.generate(model, [1, 2, 3], Lazy({2: 0.5}), 2, ())
    [line] = about_windows(lines)
    assert line.startswith("LazyLLM: layer 2 of gemma3_text sees 7 tokens")


def test_a_users_method_is_warned_of_too(lines: pytest.LogCaptureFixture) -> None:
    @dataclass(frozen=True)
    class Own(Prune):
        layer: int
        label = "own"

        def kept(self, depth: Depth, n: int) -> dict[int, int]:
            return {self.layer: ceil(n / 2)}

    config = config_of(PATTERNS["gemma 3 270m"])
    Own(6).check(config)
    assert about_windows(lines) == []
    Own(7).check(config)
    assert [line.partition(" of ")[0] for line in about_windows(lines)] == ["own: layer 7"]


def test_two_shares_that_fall_on_one_layer_are_refused_with_the_layers() -> None:
    depth = Depth.of(config_of(PATTERNS["gemma 3 270m"]))
    assert Schedule.parse({"40%": 0.5, "90%": 0.5}, depth) == Schedule({6: 0.5, 12: 0.5})
    with pytest.raises(ValueError, match="are the same of 18 layers, of which 6, 12, 18 see the whole prompt"):
        Schedule.parse({"40%": 0.5, "60%": 0.5}, depth)


# --- A token that only full-attention layers see ---

WINDOW, N, HIDDEN_TOKEN, PLACE = 7, 60, 5, 40
KINDS: dict[str, dict[str, Any]] = {
    "gemma3_text": {"query_pre_attn_scalar": 24},
    "gemma2": {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "attn_implementation": "eager"},
    "qwen2": {"use_sliding_window": True},
    "olmo3": {},
    "cohere2": {},
    "ministral": {},
}


def pattern_of(seed: int) -> list[str]:
    """The kinds of 9 layers; of seed 0 every third has full attention, else 2 to 4 random ones, not the last alone."""
    full = {2, 5, 8}
    if seed:
        rng = random.Random(seed)
        full = {*rng.sample(range(1, 8), 2), *rng.sample(range(9), rng.randint(0, 2))}
    return ["full_attention" if index in full else "sliding_attention" for index in range(9)]


@cache
def windowed(architecture: str, seed: int) -> PreTrainedModel:
    """A random model in which every query of a full-attention layer attends to `HIDDEN_TOKEN` most.

    All hidden states share a component, which queries read; this token alone has another, which keys read. No layer
    writes to either. Both go to the last dimension of the heads, which RoPE turns least.
    """
    kinds = pattern_of(seed)
    settings = {"layer_types": kinds, "sliding_window": WINDOW} | KINDS[architecture]
    if architecture == "gemma3_text":
        rope = {"rope_type": "default", "rope_theta": 1e4}
        settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
    with casts_in_float64():
        model: Any = random_model(architecture, seed, num_layers=9, **settings)
    table = model.model.embed_tokens.weight
    table[:, 0], table[:, 1], table[HIDDEN_TOKEN, 1] = 8.0, 0.0, 8.0
    for kind, layer in zip(kinds, model.model.layers, strict=True):
        layer.self_attn.o_proj.weight[:2] = layer.mlp.down_proj.weight[:2] = 0
        if kind == "sliding_attention":
            continue
        for part, coordinate in ((layer.self_attn.q_proj, 0), (layer.self_attn.k_proj, 1)):
            by_head = part.weight.view(-1, layer.self_attn.head_dim, part.weight.shape[1])
            by_head *= 0.05
            by_head[:, -1] = 0
            by_head[:, -1, coordinate] = 20
            if part.bias is not None:
                part.bias.zero_()
        for norm in ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm"):  # random weights may be negative
            if norm in dict(layer.named_modules()):
                layer.get_submodule(norm).weight.fill_(1.0)
    return model


def prompt_with_the_token(seed: int) -> list[int]:
    rng = random.Random(f"prompt {seed}")
    others = [token for token in range(VOCABULARY) if token != HIDDEN_TOKEN]
    return [HIDDEN_TOKEN if place == PLACE else rng.choice(others) for place in range(N)]


# Settings that drop tokens, at the layers that each method chooses itself; queries are so few that no window of theirs
# reaches back to `PLACE`
SURVIVES: dict[str, Method] = {
    "lazy, paper": Lazy(),
    "lazy, a share of the depth": Lazy("50%:0.3"),
    "lazy, without revival": Lazy("50%:0.3", revive=False),
    "static_pruning": StaticPruning(keep=0.3),
    "gemfilter": GemFilter(keep=0.3),
    "fastkv": FastKV(keep=0.3, retain=1),
    "claa": CLAA(keep=0.3, retain=1),
    "asl": ASL(threshold=2.0, keep=0.2, window=8, layers=1, retain=1),
    "uniprefill": UniPrefill(p=0.3, window=4, block=2, first=2, last=4),
    "promptdistill": PromptDistill(keep=0.3),
    "pyramidinfer": PyramidInfer(decay=0.5),
    "specprefill": SpecPrefill(keep=0.3, chunk=4, lookahead=3),
}


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3, 4)])
def test_only_full_attention_layers_see_the_token(architecture: str, seed: int) -> None:
    """The premise, by the model's own attention: nothing of the methods runs."""
    model: Any = windowed(architecture, seed)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad(), casts_in_float64():
        attentions = model(torch.tensor([prompt_with_the_token(seed)]), output_attentions=True).attentions
    model.set_attn_implementation(before)
    for kind, attention in zip(pattern_of(seed), attentions, strict=True):
        rows = attention[0, :, -12:].mean(dim=0)  # of the last queries, all of which methods look from
        if kind == "full_attention":
            assert (rows.argmax(dim=-1) == PLACE).all()
        else:
            assert (rows[:, PLACE] == 0).all()


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("name", SURVIVES)
@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3, 4)])
def test_token_outside_every_window_survives(name: str, architecture: str, seed: int) -> None:
    model, method = windowed(architecture, seed), SURVIVES[name]
    with casts_in_float64():
        out = lazyllm.generate(model, prompt_with_the_token(seed), method, 4, ())
    chosen = [kept for kept in out.selected[0].values() if len(kept) < N]
    assert chosen
    assert all(PLACE in kept for kept in chosen)
    if isinstance(method, Lazy):
        assert all(PLACE in kept for step in out.selected for kept in step.values())


# The same at layers 1, 2 and 4, which have windows
BLIND: dict[str, Method] = {
    "lazy": Lazy({1: 0.3}),
    "static_pruning": StaticPruning(2, 0.3),
    "fastkv": FastKV(2, 0.3, 1),
    "claa": CLAA(2, 0.3, retain=1),
    "uniprefill": UniPrefill([4], p=0.1, window=4, block=2, first=2, last=4),
    "promptdistill": PromptDistill(layers=[2], keep=0.3),
}


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.parametrize("name", BLIND)
def test_layer_with_a_window_by_number_drops_it(name: str, architecture: str) -> None:
    """The user is obeyed, and the test above can fail."""
    with casts_in_float64():
        out = lazyllm.generate(windowed(architecture, 0), prompt_with_the_token(0), BLIND[name], 2, ())
    [(layer, kept)] = out.selected[0].items()
    assert layer in (1, 2, 4)
    assert PLACE not in kept


def test_trianglemix_drops_nothing() -> None:
    out = lazyllm.generate(windowed("qwen2", 0), prompt_with_the_token(0), TriangleMix(1, 1, 3, 2), 2, ())
    assert out.computed[0].tolist() == [N] * 9
