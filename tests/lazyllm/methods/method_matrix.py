"""One row a method: what every method's tests run over (`test_methods.py`). A new method adds its rows here."""

from __future__ import annotations

from lazyllm.methods import Baseline, Lazy, Method, PromptCompression, RandomDrop, StaticPruning

# parameters that prune, for a model of 4 layers
PRUNING: dict[str, Method] = {
    "lazy": Lazy({1: 0.6, 3: 0.5}),
    "lazy, one token": Lazy({1: 0.01, 2: 0.01, 4: 0.01}),
    "lazy, prune_generated": Lazy({2: 0.5}, prune_generated=True),
    "lazy, without revival": Lazy({1: 0.6, 3: 0.5}, revive=False),
    "prompt_compression": PromptCompression(0.5, "token"),
    "prompt_compression, one token": PromptCompression(0.01, "token"),
    "prompt_compression, windows": PromptCompression(0.7, "token", window=8),
    "random_drop": RandomDrop(0.5, seed=3),
    "static_pruning": StaticPruning(2, 0.4),
    "static_pruning, after the last layer": StaticPruning(4, 0.4),
}
# parameters that keep everything: the baseline
KEEPING: dict[str, Method] = {
    "baseline": Baseline(),
    "lazy": Lazy({1: 1.0, 3: 1.0}),
    "prompt_compression": PromptCompression(1.0, "token"),
    "random_drop": RandomDrop(1.0),
    "static_pruning": StaticPruning(2, 1.0),
}
