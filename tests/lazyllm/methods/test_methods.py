"""Properties of every method in `method_matrix.py`, and some of the simple ones only."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import lazyllm
from lazyllm.check import invariants
from lazyllm.engine.inputs import Prompt
from lazyllm.methods import METHODS, RandomDrop
from tests.lazyllm.methods.method_matrix import LISTED, ROWS, Row
from tests.reference import random_model

LAYERS = 4
MODEL = random_model("qwen3", 4, num_layers=LAYERS)
PROMPT = np.random.default_rng(0).integers(0, 97, 21).tolist()


def test_matrix_is_complete() -> None:
    assert {name.split(",")[0] for name in LISTED} == set(METHODS)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_keeping_everything_is_the_baseline(row: Row) -> None:
    invariants.can_keep_everything(MODEL, row.pruning, PROMPT)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("n", [3, 21])
def test_declared_counts_are_computed(row: Row, n: int) -> None:
    out = invariants.counts_what_it_computes(MODEL, row.pruning, PROMPT[:n])
    assert (out.scoring_tokens > 0) <= row.scores
    if not row.scores:  # scoring may cost more than pruning saves
        assert row.pruning.ideal_speedup(MODEL.config, n) >= 1


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_method_has_no_state(row: Row) -> None:
    invariants.has_no_state(MODEL, row.pruning, PROMPT)


@pytest.mark.parametrize(
    "row", [row for row in ROWS.values() if not row.asks], ids=lambda row: row.pruning.label
)
def test_pruned_tokens_are_never_computed_later(row: Row) -> None:
    out = lazyllm.generate(MODEL, PROMPT, row.pruning, 8, ())
    assert (out.computed == out.computed[0]).all()
    assert out.aux_bytes == 0


def test_methods_are_made_without_torch() -> None:
    code = """
import sys, lazyllm
assert lazyllm.methods.support.plugins.installed.cache_info().misses == 0  # none searched
lazyllm.methods.make("lazy", {"schedule": {2: 0.5}}).tokens_per_layer(lazyllm.methods.Depth(8), 100)
for kind in lazyllm.methods.METHODS.values():
    if all(hasattr(kind, name) for name in lazyllm.methods.settings_of(kind)):
        kind().tokens_per_layer(lazyllm.methods.Depth(8), 100)
heavy = {"torch", "transformers", "pandas"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(lazyllm.__all__) <= set(dir(lazyllm))
    assert lazyllm.generate.__module__ == "lazyllm.engine.generation"


def test_random_drop_draws_by_seed_and_evenly() -> None:
    def kept(seed: int) -> list[int]:
        return RandomDrop(0.3, seed).select(None, Prompt(torch.zeros(40, dtype=torch.long)))

    draws = [kept(seed) for seed in range(400)]
    assert kept(0) == draws[0]
    assert len({tuple(draw) for draw in draws}) == 400
    counts = np.bincount(np.concatenate(draws), minlength=40)
    assert counts[39] == 400
    expected = 400 * 11 / 39  # 11 more of 39; six standard deviations of a binomial
    assert np.abs(counts[:39] - expected).max() < 6 * np.sqrt(expected * (1 - 11 / 39))


def test_random_drop_draws_by_prompt() -> None:
    """Prompts cut to one length lose tokens at different places, and each place equally often."""
    prompts = [Prompt(torch.arange(first, first + 40)) for first in range(400)]
    draws = [RandomDrop(0.3).select(None, prompt) for prompt in prompts]
    assert len({tuple(draw) for draw in draws}) == 400
    assert draws[7] == RandomDrop(0.3).select(None, Prompt(torch.arange(7, 47)))
    counts = np.bincount(np.concatenate(draws), minlength=40)
    expected = 400 * 11 / 39
    assert np.abs(counts[:39] - expected).max() < 6 * np.sqrt(expected * (1 - 11 / 39))


def test_random_drop_keeps_the_template_unless_asked() -> None:
    """Of "[A]bcdefgh[/A]:", a letter a token behind a special one, the format wrote [A] and
    [/A].
    """
    text = "[A]bcdefgh[/A]:"
    spans = ((0, 0), *((place, place + 1) for place in range(len(text))))
    prompt = Prompt(torch.arange(len(spans)), text, spans, template=((0, 3), (10, 14)))
    template, newest = {0, 1, 2, 3, 11, 12, 13, 14}, len(spans) - 1
    for seed in range(50):
        kept = RandomDrop(0.75, seed).select(None, prompt)
        assert kept == sorted(set(kept))
        assert len(kept) == 12
        assert template | {newest} <= set(kept)
    dropped = [
        template - {*RandomDrop(0.75, seed, drop_template=True).select(None, prompt)}
        for seed in range(50)
    ]
    assert set.union(*dropped) == template
    # no room for all of the template
    assert RandomDrop(0.25).select(None, prompt) == [12, 13, 14, newest]
