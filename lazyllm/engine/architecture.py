"""The model's code before its layers and after its last norm, run without the layers.

The checks refuse a model that the loop over layers (`decoder`) cannot reproduce. They look at what
the model's code does, never at its name.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from lazyllm.engine.devices import main_device, replaced
from lazyllm.engine.flops import windows_of
from lazyllm.errors import UserError

# Tensor arguments of a layer that the loop passes, or that a layer can do without
_GIVEN = frozenset(
    {"hidden_states", "attention_mask", "position_ids", "past_key_values"}
    | {"position_embeddings", "cache_position"}
)
_CHECKED: WeakSet[PreTrainedModel] = WeakSet()


def check_structure(model: PreTrainedModel) -> None:
    """Refuse an unsupported structure, without running it."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UserError(f"{name} is a model after torch.compile: give the model itself")
    inner: Any = getattr(model, "model", None)
    missing = [part for part in ("embed_tokens", "layers", "norm") if not hasattr(inner, part)]
    if missing or not hasattr(model, "lm_head"):
        raise UserError(
            f"{name} is not built like a Llama (no {', '.join(missing) or 'lm_head'}); supported: "
            "decoders with embed_tokens, layers, norm and lm_head, see docs/architectures.md"
        )
    count, expected = len(inner.layers), model.config.num_hidden_layers
    if count != expected:
        raise UserError(f"{name} has {count} modules in `layers`, but num_hidden_layers={expected}")
    for layer in inner.layers:
        accepted = inspect.signature(layer.forward).parameters
        for keyword in ("position_embeddings", "past_key_values", "attention_mask"):
            if keyword not in accepted:  # **kwargs would swallow it silently
                raise UserError(
                    f"the layers of {name} take no `{keyword}`, unlike those of transformers 5"
                )
    if any(part.training for part in (model, *inner.layers)):
        raise UserError(
            f"{name}, or a layer of it, is in training mode (dropout): call model.eval() first"
        )


@torch.inference_mode()
def check_surroundings(model: PreTrainedModel) -> None:
    """Refuse a model that does more around its layers than the loop reproduces; once per model.

    One token runs through the model's code without its layers, with a cache that holds more tokens
    than any sliding window. No weight matrix is multiplied. Raises UserError.
    """
    check_structure(model)
    if model in _CHECKED:
        return
    name, windows = type(model).__name__, windows_of(model.config)
    past = max((window for window in windows if window is not None), default=8) + 1
    hidden, calls = _trial_run(model, past)
    if [call["layer"] for call in calls] != [*range(len(windows))]:
        raise UserError(f"{name} does not run each of its layers once, in their order")
    if any(call["hidden_states"] is not hidden for call in calls):
        raise UserError(f"{name} changes the hidden states between its layers: not supported")
    tensors = {key for call in calls for key, value in call.items() if torch.is_tensor(value)}
    if others := sorted(tensors - _GIVEN):
        raise UserError(
            f"{name} gives its layers {', '.join(others)} beside hidden states, masks and positions"
        )
    if any(len(call.get("position_embeddings") or ()) != 2 for call in calls):
        raise UserError(f"{name} gives its layers no cos and sin: not supported")
    distances = torch.arange(past, -1, -1)
    for number, (call, window) in enumerate(zip(calls, windows, strict=True), start=1):
        mask = call["attention_mask"]
        expected = distances < (past + 1 if window is None else window)
        if mask is None or not torch.equal(mask.reshape(-1).cpu() == 0, expected):
            reach = "all tokens" if window is None else f"the last {window} tokens"
            raise UserError(
                f"layer {number} of {name} should attend to {reach} by its config, but the model's "
                "mask differs; only causal attention and sliding windows are supported"
            )
    _CHECKED.add(model)


def _trial_run(model: PreTrainedModel, past: int) -> tuple[Tensor, list[dict[str, Any]]]:
    """Run one token up to the layers, with a cache of `past` tokens."""
    device, cache = main_device(model), DynamicCache()
    token = torch.zeros(1, dtype=torch.long, device=device)
    filler = torch.zeros(1, 1, past, 1, device=device, dtype=model.dtype)
    try:
        cache.update(filler, filler, 0)
        # other implementations of attention may get no mask
        with replaced(model.config, "_attn_implementation", "eager"):
            # `token` is also the position, 0: there, a RoPE that grows with the text resets itself
            return Surroundings(model).before_layers(token, token, cache)
    except torch.OutOfMemoryError:  # not the model's fault
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        name = type(model).__name__
        raise UserError(f"{name} cannot be run without its layers: {error}") from error


class Surroundings:
    """What a model does before its layers and after its last norm, by its `forward`.

    The module is not called, so that a user's hooks see the model's own runs only.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._calls: list[dict[str, Any]] = []
        layers = enumerate(self._model.model.layers)
        self._stand_ins = [_StandIn(index, layer, self._calls) for index, layer in layers]

    def before_layers(
        self, token_ids: Tensor, positions: Tensor, cache: DynamicCache | None = None
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        """Return the hidden states [1, m, w] that enter layer 1, and the arguments of each layer.

        cache: the model makes masks for it; without one, maybe none.
        """
        inner = self._model.model
        stand_ins = {"layers": self._stand_ins, "norm": lambda hidden: hidden}
        with _in_place_of_modules(inner, **stand_ins):
            hidden = inner.forward(
                input_ids=token_ids[None],
                position_ids=positions[None],
                past_key_values=cache,
                use_cache=cache is not None,
                return_dict=True,
            ).last_hidden_state
        calls = [*self._calls]
        self._calls.clear()
        return hidden, calls

    def logits(self, normed: Tensor) -> Tensor:
        """Compute the logits [1, m, v] of hidden states [1, m, w] after the last norm."""
        # this output type also serves models without experts
        inner = MoeModelOutputWithPast(last_hidden_state=normed)
        with _in_place_of_modules(self._model, model=lambda *_, **__: inner):
            return self._model.forward(use_cache=False, return_dict=True).logits


@contextmanager
def _in_place_of_modules(owner: nn.Module, **others: Any) -> Iterator[None]:
    """Let attributes of `owner` hide its submodules: plain objects, which are faster to use."""
    vars(owner).update(others)
    try:
        yield
    finally:
        for name in others:
            del vars(owner)[name]


class _StandIn:
    """Records the arguments of a layer's call, and returns the hidden states as they are."""

    def __init__(self, index: int, layer: nn.Module, calls: list[dict[str, Any]]) -> None:
        self._index = index
        self._calls = calls
        self._names = list(inspect.signature(layer.forward).parameters)
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        """Read attributes, such as the layer's type, from the layer."""
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        call = {"layer": self._index, **dict(zip(self._names, args, strict=False)), **kwargs}
        self._calls.append(call)
        return call["hidden_states"]
