"""Every method with settings and prompts at the edge: each is right, or refused in one line before a model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyllm
from lazyllm.check import invariants
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, SpecPrefill, make
from tests.reference import random_model, random_variant

MODEL = random_model("llama", 1, num_layers=4)
PROMPT = np.random.default_rng(3).integers(1, 97, 21).tolist()

# Values without a default, and values that drop some of 21 tokens
USUAL: dict[str, dict[str, Any]] = {name: {} for name in METHODS} | {
    "asl": {"first": 1, "layers": 2, "threshold": 2.0, "keep": 4, "window": 3},
    "gemfilter": {"keep": 4},
    "prompt_compression": {"keep": 0.5, "unit": "token"},
    "random_drop": {"keep": 0.5},
    "specprefill": {"chunk": 4},
    "static_pruning": {"layer": 2, "keep": 0.5},
}
BEYOND_THE_MODEL: dict[str, dict[str, Any]] = {
    "asl": {"first": 5},
    "claa": {"layer": 5},
    "fastkv": {"layer": 5},
    "gemfilter": {"layer": 5},
    "lazy": {"schedule": {5: 0.5}},
    "static_pruning": {"layer": 5},
}
# A window, a chunk or a number of first tokens that is longer than any prompt here
LONGER_THAN_THE_PROMPT: dict[str, dict[str, Any]] = {
    "asl": {"window": 99},
    "claa": {"window": 99},
    "fastkv": {"window": 99},
    "gemfilter": {"window": 99, "sound": True},
    "oracle": {"pool": 99},
    "prompt_compression": {"window": 99},
    "pyramidinfer": {"first": 99},
    "specprefill": {"chunk": 99, "sound": True},
}
TOO_MANY: dict[str, dict[str, Any]] = {name: {"keep": 10**6} for name in ("asl", "gemfilter", "oracle")}
NO_SHARE: dict[str, dict[str, Any]] = {
    **{name: {"keep": 1.5} for name in METHODS if name not in ("baseline", "lazy", "pyramidinfer")},
    "lazy": {"schedule": {2: 1.5}},
    "pyramidinfer": {"decay": 1.5},
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("n", [1, 2, 3, 21])
def test_short_prompts_and_long_windows(name: str, n: int) -> None:
    for edge in ({}, LONGER_THAN_THE_PROMPT.get(name, {})):
        invariants.counts_what_it_computes(MODEL, make(name, USUAL[name] | edge), PROMPT[:n])


@pytest.mark.parametrize("name", BEYOND_THE_MODEL)
def test_a_layer_beyond_the_model(name: str) -> None:
    with pytest.raises(ValueError, match=r"5.*only 4 layers") as refused:
        make(name, USUAL[name] | BEYOND_THE_MODEL[name]).check(MODEL.config)
    assert "\n" not in str(refused.value)


def test_a_layer_beyond_the_model_has_the_name_of_its_setting() -> None:
    for name, key in (("asl", "first"), ("fastkv", "layer"), ("gemfilter", "layer")):
        with pytest.raises(ValueError, match=f"^{key}=5, but the model has only 4 layers"):
            make(name, USUAL[name] | {key: 5}).check(MODEL.config)


@pytest.mark.parametrize("threshold", [float("nan"), 0, -1.0, True, "0.3"])
def test_a_threshold_that_is_no_number_above_zero(threshold: object) -> None:
    with pytest.raises(UserError, match=f"threshold={threshold!r}: give a number above 0"):
        make("asl", {"threshold": threshold})


@pytest.mark.parametrize("name", TOO_MANY)
def test_more_tokens_than_there_are_is_all_of_them(name: str) -> None:
    invariants.is_the_model(MODEL, make(name, USUAL[name] | TOO_MANY[name]), PROMPT)


@pytest.mark.parametrize("name", NO_SHARE)
def test_a_share_above_one(name: str) -> None:
    with pytest.raises((UserError, ValueError), match=r"\(0, 1\].*1\.5") as refused:
        make(name, USUAL[name] | NO_SHARE[name]).check(MODEL.config)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", METHODS)
def test_unknown_later_turns(name: str) -> None:
    message = "has no setting 'turns'" if name in ("baseline", "lazy") else "turns='never': give 'continue' or 'again'"
    with pytest.raises(UserError, match=message):
        make(name, USUAL[name] | {"turns": "never"})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 40}, "has 40 tokens in its vocabulary, the model 97: give a draft with the model's tokenizer"),
        ({"vocab_size": 900}, "has 900 tokens in its vocabulary, the model 97"),
        ({"num_hidden_layers": 40}, "times as large as the model: give a smaller model"),
    ],
)
def test_a_draft_that_does_not_fit(sizes: dict[str, int], message: str, tmp_path: Path) -> None:
    random_variant("llama", 7, **sizes).save_pretrained(tmp_path)
    method = SpecPrefill(str(tmp_path), keep=0.5, chunk=4)
    with pytest.raises(ValueError, match=message):
        lazyllm.generate(MODEL, PROMPT, method, 2, ())
    inside: Any = lazyllm.generate_with(method)
    with pytest.raises(ValueError, match=message):
        MODEL.generate(torch.tensor([PROMPT]), custom_generate=inside, max_new_tokens=2)


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_is_sent_to_model_generate(name: str) -> None:
    with pytest.raises(ValueError, match=r"Batches are not supported here: use model\.generate"):
        lazyllm.generate(MODEL, [PROMPT, PROMPT], make(name, USUAL[name]), 2, ())
