"""The model's own code before its layers and after its last norm, run without the layers.

The checks here refuse a model that the loop over layers (`lazyllm.engine.decoder`) cannot reproduce. They look at what
the model's code does, never at the model's name.
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


def check_structure(model: PreTrainedModel) -> None:
    """Refuse a model whose structure is not supported, without running it. Raises UserError that names the cause."""
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UserError(f"{name} is a model after torch.compile: give the model itself")
    inner: Any = getattr(model, "model", None)
    missing = [part for part in ("embed_tokens", "layers", "norm") if not hasattr(inner, part)]
    if missing or not hasattr(model, "lm_head"):
        raise UserError(
            f"{name} is not built like a Llama (no {', '.join(missing) or 'lm_head'}); "
            "supported: decoders with embed_tokens, layers, norm and lm_head, see docs/architectures.md"
        )
    count, expected = len(inner.layers), model.config.num_hidden_layers
    if count != expected:
        raise UserError(f"{name} has {count} modules in `layers`, but num_hidden_layers={expected}")
    for layer in inner.layers:
        accepted = inspect.signature(layer.forward).parameters
        for keyword in ("position_embeddings", "past_key_values", "attention_mask"):
            if keyword not in accepted:  # **kwargs would swallow it silently
                raise UserError(f"the layers of {name} take no `{keyword}`, unlike those of transformers 5")
    if any(part.training for part in (model, *inner.layers)):
        raise UserError(f"{name}, or a layer of it, is in training mode (dropout): call model.eval() first")


# Tensor arguments of a layer that the loop passes, or that a layer can do without. A model that passes others does more
# than the loop
_GIVEN = frozenset(
    {"hidden_states", "attention_mask", "position_ids", "past_key_values", "position_embeddings", "cache_position"}
)


_CHECKED: WeakSet[PreTrainedModel] = WeakSet()


@torch.inference_mode()
def check_surroundings(model: PreTrainedModel) -> None:
    """Refuse a model that does more around its layers than the loop over layers reproduces; checked once per model.

    Runs one token through the model's own code without its layers. The cache holds more tokens than any sliding window.
    No weight matrix is multiplied. Raises UserError as `check_structure`, and if the loop cannot reproduce the run.
    """
    check_structure(model)
    if model in _CHECKED:
        return
    name, windows = type(model).__name__, windows_of(model.config)
    past = max((window for window in windows if window is not None), default=8) + 1
    token = torch.zeros(1, dtype=torch.long, device=main_device(model))
    try:
        cache = DynamicCache()
        filler = torch.zeros(1, 1, past, 1, device=main_device(model), dtype=model.dtype)
        cache.update(filler, filler, 0)
        with replaced(model.config, "_attn_implementation", "eager"):  # other implementations may get no mask
            # `token` is also the position, 0: there, a RoPE that grows with the text (dynamic NTK) resets itself
            hidden, calls = Surroundings(model).before_layers(token, token, cache)
    except torch.OutOfMemoryError:  # not the model's fault
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"{name} cannot be run without its layers: {error}") from error
    if [call["layer"] for call in calls] != [*range(len(windows))]:
        raise UserError(f"{name} does not run each of its layers once, in their order")
    if any(call["hidden_states"] is not hidden for call in calls):
        raise UserError(f"{name} changes the hidden states between its layers: not supported")
    others = {key for call in calls for key, value in call.items() if torch.is_tensor(value)} - _GIVEN
    if others:
        raise UserError(
            f"{name} gives its layers {', '.join(sorted(others))} beside hidden states, masks and positions"
        )
    if any(len(call.get("position_embeddings") or ()) != 2 for call in calls):
        raise UserError(f"{name} gives its layers no cos and sin: not supported")
    distances = torch.arange(past, -1, -1)
    for number, (call, window) in enumerate(zip(calls, windows, strict=True), start=1):
        mask, expected = call["attention_mask"], distances < (past + 1 if window is None else window)
        if mask is None or not torch.equal(mask.reshape(-1).cpu() == 0, expected):
            reach = "all tokens" if window is None else f"the last {window} tokens"
            raise UserError(
                f"layer {number} of {name} should attend to {reach} by its config, but the model's mask differs; "
                "only causal attention and sliding windows are supported"
            )
    _CHECKED.add(model)


class Surroundings:
    """What a model does before its layers and after its last norm, by the model's own `forward`.

    `forward` is called, not the module, so that a user's hooks on the model see the model's own runs only.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._calls: list[dict[str, Any]] = []
        layers = enumerate(self._model.model.layers)
        self._stand_ins = [_StandIn(index, layer, self._calls) for index, layer in layers]

    def before_layers(
        self, token_ids: Tensor, positions: Tensor, cache: DynamicCache | None = None
    ) -> tuple[Tensor, list[dict[str, Any]]]:
        """[1, m, w] hidden states that enter layer 1, and the arguments of each layer's call.

        token_ids, positions: [m]. cache: the cache that the model makes its masks for; without one it may make none.
        """
        inner = self._model.model
        with _in_place_of_modules(inner, layers=self._stand_ins, norm=lambda hidden: hidden):
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
        """[1, m, v] logits of hidden states [1, m, w] after the last norm."""
        # this output type also serves models without experts
        inner = MoeModelOutputWithPast(last_hidden_state=normed)
        with _in_place_of_modules(self._model, model=lambda *_, **__: inner):
            return self._model.forward(use_cache=False, return_dict=True).logits


@contextmanager
def _in_place_of_modules(owner: nn.Module, **others: Any) -> Iterator[None]:
    """Within this context, attributes of `owner` hide its submodules of the same names.

    The attributes are plain objects, which are faster to call and to index than modules.
    """
    vars(owner).update(others)
    try:
        yield
    finally:
        for name in others:
            del vars(owner)[name]


class _StandIn:
    """Stands in for a layer: records the arguments of a call, and returns the hidden states as they are."""

    def __init__(self, index: int, layer: nn.Module, calls: list[dict[str, Any]]) -> None:
        self._index = index
        self._calls = calls
        self._names = list(inspect.signature(layer.forward).parameters)
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        """Attributes that a model reads from its layers, such as their type, are the layer's."""
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        call = {"layer": self._index, **dict(zip(self._names, args, strict=False)), **kwargs}
        self._calls.append(call)
        return call["hidden_states"]
