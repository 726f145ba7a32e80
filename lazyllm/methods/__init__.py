"""The methods, one file each. A new one is a file, a line here, a config and a row in `tests/method_matrix.py`."""

from lazyllm.methods.base import Method
from lazyllm.methods.baseline import Baseline
from lazyllm.methods.lazy import Lazy

__all__ = ["Baseline", "Lazy", "Method"]
