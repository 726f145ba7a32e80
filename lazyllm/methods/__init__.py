"""The methods, one file each. A new one is a file, its row here, a config and a row in the tests' method matrix."""

from lazyllm.methods.base import Method
from lazyllm.methods.baseline import Baseline
from lazyllm.methods.lazy import Lazy

METHODS: dict[str, type[Method]] = {"baseline": Baseline, "lazy": Lazy}

__all__ = ["METHODS", "Baseline", "Lazy", "Method"]
