"""LazyLLM (arXiv 2407.14057): prune prompt tokens layer by layer, so that long prompts start fast.

import lazyllm

model, tokenizer = lazyllm.load_model("tiny")
text = "entry zanur lantern copper. the old house was quiet. Question: entry zanur"
inputs = tokenizer(text, return_tensors="pt")
# after layer 2 keep half of the tokens, after layer 5 half of those
method = lazyllm.methods.Lazy({2: 0.5, 5: 0.5})
with lazyllm.using(model, method):
    output = model.generate(**inputs.to(model.device), max_new_tokens=8)
print(tokenizer.decode(output[0], skip_special_tokens=True))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lazyllm import methods
from lazyllm.engine.inputs import Prompt
from lazyllm.errors import UserError
from lazyllm.methods.support.schedule import Schedule

if TYPE_CHECKING:
    from lazyllm.engine.generation import Generation, generate, generate_many
    from lazyllm.integrations.transformers_generate import using
    from lazyllm.models.load import load_model

# imported on first use: these need torch and transformers, which take seconds to import
_HEAVY = {
    "Generation": "lazyllm.engine.generation",
    "generate": "lazyllm.engine.generation",
    "generate_many": "lazyllm.engine.generation",
    "load_model": "lazyllm.models.load",
    "using": "lazyllm.integrations.transformers_generate",
}

__all__ = [
    "Generation",
    "Prompt",
    "Schedule",
    "UserError",
    "generate",
    "generate_many",
    "load_model",
    "methods",
    "using",
]


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module 'lazyllm' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HEAVY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
