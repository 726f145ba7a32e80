"""The methods, one file each. A new one is a file, a row here, a config, a row in `tests/lazyllm/method_matrix.py`."""

from lazyllm.methods.base import Method
from lazyllm.methods.baseline import Baseline
from lazyllm.methods.lazy import Lazy
from lazyllm.methods.prompt_compression import PromptCompression
from lazyllm.methods.random_drop import RandomDrop
from lazyllm.methods.static_pruning import StaticPruning

METHODS: dict[str, type[Method]] = {
    "baseline": Baseline,
    "lazy": Lazy,
    "prompt_compression": PromptCompression,
    "random_drop": RandomDrop,
    "static_pruning": StaticPruning,
}

__all__ = ["METHODS", "Baseline", "Lazy", "Method", "PromptCompression", "RandomDrop", "StaticPruning"]
