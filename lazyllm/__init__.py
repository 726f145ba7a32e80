"""LazyLLM (arXiv 2407.14057): prune prompt tokens layer by layer, so that long prompts start fast."""

from lazyllm import methods
from lazyllm.decoder import UnsupportedModelError
from lazyllm.generate_with import generate_with, using
from lazyllm.generation import Generation, generate
from lazyllm.models import ModelError, load_model
from lazyllm.prompt import Prompt
from lazyllm.schedule import Schedule
from lazyllm.tokenizers import TokenizerError

__all__ = [
    "Generation",
    "ModelError",
    "Prompt",
    "Schedule",
    "TokenizerError",
    "UnsupportedModelError",
    "generate",
    "generate_with",
    "load_model",
    "methods",
    "using",
]
