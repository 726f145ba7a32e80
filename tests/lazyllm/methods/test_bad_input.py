"""Every method with settings and prompts at the edge: each is right, or refused in one line
before a model loads.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyllm
from lazyllm.check import invariants
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, SpecPrefill, by_name, make, settings_of
from tests.helpers import byte_tokenizer, tiny
from tests.lazyllm.methods.method_matrix import LISTED
from tests.reference import random_model, random_variant

MODEL = random_model("llama", 1, num_layers=4)
PROMPT = np.random.default_rng(3).integers(1, 97, 21).tolist()

# A window, a chunk or a number of first tokens that is longer than any prompt here
LONGER_THAN_THE_PROMPT: dict[str, dict[str, Any]] = {
    "asl": {"window": 99},
    "claa": {"window": 99},
    "fastkv": {"window": 99},
    "gemfilter": {"window": 99, "sound": True},
    "promptdistill": {"pool": 99},
    "prompt_compression": {"window": 99},
    "pyramidinfer": {"first": 99},
    "specprefill": {"chunk": 99, "sound": True},
    "trianglemix": {"sinks": 99, "window": 99, "last": 99},
    "uniprefill": {"window": 99, "block": 99, "first": 99},
}
CUTS = {"asl": "first", "claa": "layer", "fastkv": "layer", "gemfilter": "layer"}
# (method, its settings, what the message must name: the key, and the values that it takes)
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (name, {"keep": 1.5}, r"keep=1\.5.*\(0, 1\]")
        for name in METHODS
        if "keep" in settings_of(by_name(name))
    ),
    ("lazy", {"schedule": {2: 1.5}}, r"layer 2.*\(0, 1\].*1\.5"),
    ("lazy", {"prune_generated": True, "revive": False}, "revive=False"),
    ("lazy", {"revive": "off"}, "revive='off': give true or false"),
    ("pyramidinfer", {"decay": 1.5}, r"decay=1\.5.*\(0, 1\]"),
    ("random_drop", {"keep": 0}, r"keep.*\(0, 1\]"),
    ("random_drop", {"keep": "half"}, "keep.*number"),
    ("static_pruning", {"layer": 0}, "layer.*1 or more"),
    ("static_pruning", {"layer": 1.5}, "layer.*1 or more"),
    ("prompt_compression", {"unit": "word"}, "unit='word': give 'token' or 'sentence'"),
    (
        "prompt_compression",
        {"unit": "token", "scoring": "sentences"},
        "whole sentences: give unit='sentence'",
    ),
    ("prompt_compression", {"scoring": "words"}, "scoring='words': give 'context' or 'sentences'"),
    ("prompt_compression", {"window": 1}, "window.*2 or more"),
    ("prompt_compression", {"scorer": 3}, "scorer=3.*name of a model"),
    ("gemfilter", {"layer": 0}, "layer.*1 or more"),
    ("gemfilter", {"keep": 0}, "keep.*1 or more"),
    ("gemfilter", {"pool": 4}, "pool=4.*odd"),
    ("fastkv", {"retain": 2}, r"retain.*\(0, 1\]"),
    ("fastkv", {"window": 0}, "window.*1 or more"),
    ("fastkv", {"pooling": "sum"}, "pooling='sum': give 'max' or 'average'"),
    ("claa", {"retain": 0.5}, "retain=0.5.*null.*1"),
    ("claa", {"layers": 0}, "layers.*1 or more"),
    ("specprefill", {"draft": 3}, "draft=3.*name of a model"),
    ("specprefill", {"lookahead": 0}, "lookahead.*1 or more"),
    ("specprefill", {"chunk": 0}, "chunk.*1 or more"),
    ("pyramidinfer", {"weight": 0}, "weight=0.*above 0"),
    *(
        ("asl", {"threshold": bad}, "threshold=.*above 0")
        for bad in (float("nan"), 0, -1.0, True, "0.3")
    ),
    ("asl", {"first": 0}, "first.*1 or more"),
    ("uniprefill", {"p": 1.5}, r"p=1\.5.*\(0, 1\]"),
    ("uniprefill", {"layers": []}, r"layers=\[\].*\[8, 12\]"),
    *(
        ("uniprefill", {"layers": bad}, "layers=.*give a list, each a whole number of 1 or more")
        for bad in ("8", 8)
    ),
    ("uniprefill", {"layers": [0]}, "layers.*1 or more"),
    ("uniprefill", {"layers": [2, 5]}, "layers=5.*only 4 layers"),
    *(("uniprefill", {key: 0}, f"{key}.*1 or more") for key in ("window", "block", "last")),
    ("promptdistill", {"pool": 4}, "pool=4.*odd"),
    ("promptdistill", {"layers": [2, 5]}, "layers=5.*only 4 layers"),
    *(
        (
            "promptdistill",
            {"layers": layers, "keep": [0.5, 4]},
            "ascending layers, and a keep for each",
        )
        for layers in ([3, 2], [2, 2], [1, 2, 3], None)
    ),
    *(("trianglemix", {key: 0}, f"{key}.*1 or more") for key in ("window", "last")),
    ("trianglemix", {"dense": -1}, "dense.*0 or more"),
    ("trianglemix", {"dense": 1.5}, r"dense=1\.5.*\(0, 1\]"),
    *((name, {key: 5}, f"{key}=5.*only 4 layers") for name, key in CUTS.items()),
    ("lazy", {"schedule": {5: 0.5}}, "layer 5.*only 4 layers"),
    ("static_pruning", {"layer": 5}, "layer 5.*only 4 layers"),
]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("n", [1, 2, 21])
def test_short_prompts_and_long_windows(name: str, n: int) -> None:
    method: Any = replace(LISTED[name].pruning, **LONGER_THAN_THE_PROMPT.get(name, {}))
    invariants.counts_what_it_computes(MODEL, method, PROMPT[:n])


@pytest.mark.parametrize(("name", "settings", "message"), REFUSED, ids=str)
def test_method_refuses_bad_setting_in_one_line(
    name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises((UserError, ValueError), match=message) as refused:
        make(name, settings).check(MODEL.config)
    assert "\n" not in str(refused.value)


def test_draft_with_other_tokens_is_refused(tmp_path: Path) -> None:
    model, model_tokenizer = tiny()
    read = model_tokenizer("the old lantern", return_offsets_mapping=True)
    prompt = lazyllm.Prompt(
        torch.tensor(read["input_ids"]), "the old lantern", tuple(read["offset_mapping"])
    )
    random_variant(
        "llama", 7, num_hidden_layers=2, vocab_size=len(model_tokenizer)
    ).save_pretrained(tmp_path)
    for folder, tokenizer in (
        (tmp_path / "same", model_tokenizer),
        (tmp_path / "others", byte_tokenizer()),
    ):
        shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("same", "others"))
        tokenizer.save_pretrained(folder)
        SpecPrefill(str(folder)).check(model.config)
    SpecPrefill(str(tmp_path / "same")).check_prompt(prompt)
    with pytest.raises(
        ValueError, match="tokenises the prompt differently than the model: give a draft with"
    ):
        SpecPrefill(str(tmp_path / "others")).check_prompt(prompt)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"vocab_size": 40},
            "has 40 tokens in its vocabulary, the model 97: give a draft with the model's "
            "tokenizer",
        ),
        ({"vocab_size": 900}, "has 900 tokens in its vocabulary, the model 97"),
        ({"num_hidden_layers": 40}, "times as large as the model: give a smaller model"),
        (
            {"max_position_embeddings": 8, "num_hidden_layers": 2},
            r"draft=.*: expected \d+ positions, not 8: give another",
        ),
    ],
)
def test_draft_that_does_not_fit_is_refused(
    sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    random_variant("llama", 7, **sizes).save_pretrained(tmp_path)
    method = SpecPrefill(str(tmp_path), keep=0.5, chunk=4)
    with pytest.raises(ValueError, match=message):
        lazyllm.generate(MODEL, PROMPT, method, 2, ())
    with pytest.raises(ValueError, match=message), lazyllm.using(MODEL, method):
        MODEL.generate(torch.tensor([PROMPT]), max_new_tokens=2)
