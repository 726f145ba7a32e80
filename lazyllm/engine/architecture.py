"""What a model does around its layers, found by running the model's own code once without its layers.

Nothing here depends on a model's name. A model that the loop over layers (`lazyllm.engine.decoder`) cannot reproduce
is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from lazyllm.engine.attention import implementation
from lazyllm.engine.devices import home_of
from lazyllm.engine.flops import windows_of
from lazyllm.errors import UserError


@dataclass(frozen=True)
class RopeCall:
    """A call that makes cos and sin: the module, and its arguments besides hidden states and positions."""

    module: str
    extras: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Layout:
    """What surrounds a model's layers.

    windows: per layer, the number of positions that a token attends to, its own included; None for all before it.
    ropes: the different ways to make cos and sin. rope_of: per layer, an index into `ropes`.
    plain_embeddings: the output of `embed_tokens` enters layer 1 unchanged.
    plain_logits: the output of `lm_head` is the logits.
    """

    windows: tuple[int | None, ...]
    ropes: tuple[RopeCall, ...]
    rope_of: tuple[int, ...]
    plain_embeddings: bool
    plain_logits: bool


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
    if model.training:
        raise UserError(f"{name} is in training mode (dropout): call model.eval() first")


# The tensors that the loop gives the layers. A model that gives them others does more than the loop would
_GIVEN = frozenset(
    {"hidden_states", "attention_mask", "position_ids", "past_key_values", "position_embeddings", "cache_position"}
)


@torch.inference_mode()
def find_layout(model: PreTrainedModel) -> Layout:
    """Run one token through the model's own code without its layers, after more tokens than any window has.

    No weight matrix is used. Raises UserError as `check_structure`, and if the loop over layers cannot reproduce the
    run.
    """
    check_structure(model)
    name = type(model).__name__
    windows = windows_of(model.config)
    past = max((window for window in windows if window is not None), default=8) + 1
    try:
        layout, masks = _trace(model, windows, past)
    except torch.OutOfMemoryError:  # not the model's fault
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"{name} cannot be run without its layers: {error}") from error
    distances = torch.arange(past, -1, -1)
    for layer, (mask, window) in enumerate(zip(masks, windows, strict=True)):
        expected = distances < (past + 1 if window is None else window)
        if mask is None or not torch.equal(mask.reshape(-1).cpu() == 0, expected):
            reach = "all tokens" if window is None else f"the last {window} tokens"
            raise UserError(
                f"layer {layer + 1} of {name} should attend to {reach} by its config, but the model's mask differs; "
                "only causal attention and sliding windows are supported"
            )
    return layout


def _trace(model: PreTrainedModel, windows: Sequence[int | None], past: int) -> tuple[Layout, Sequence[Tensor | None]]:
    """The layout, and the attention mask that each layer gets for a token with `past` tokens before it."""
    inner: Any = model.model
    name = type(model).__name__
    calls: list[dict[str, Any]] = []
    made: list[tuple[RopeCall, Any]] = []
    embedded: list[Tensor] = []

    def note_embedded(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        # not the table's row: that of a padding token is zero, which hides a scale
        embedded.append(torch.linspace(1, 2, output.numel(), dtype=output.dtype, device=output.device).view_as(output))
        return embedded[-1]

    cache = DynamicCache()
    filler = torch.zeros(1, 1, past, 1, device=home_of(model), dtype=model.dtype)
    cache.update(filler, filler, 0)
    # position 0: a RoPE that grows with the length (dynamic NTK) resets itself
    token = torch.zeros(1, 1, dtype=torch.long, device=home_of(model))
    stand_ins = nn.ModuleList(_StandIn(index, layer, calls) for index, layer in enumerate(inner.layers))
    hooks = [inner.embed_tokens.register_forward_hook(note_embedded)]
    for child_name, child in inner.named_children():
        if child_name not in ("embed_tokens", "layers", "norm"):
            hooks.append(child.register_forward_hook(_note_rope(child_name, made), with_kwargs=True))
    try:
        with (
            implementation(model, "eager"),  # whose masks are complete
            _in_place_of(inner, "layers", stand_ins),
            _in_place_of(inner, "norm", nn.Identity()),
        ):
            out = inner(
                input_ids=token, position_ids=token, past_key_values=cache, use_cache=True, return_dict=True
            ).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()

    if [call["index"] for call in calls] != list(range(len(inner.layers))):
        raise UserError(f"{name} does not run each of its layers once, in their order")
    entered = calls[0]["hidden_states"]
    if any(call["hidden_states"] is not entered for call in calls) or out is not entered:
        raise UserError(f"{name} changes the hidden states between its layers: not supported")
    others = {key for call in calls for key, value in call.items() if torch.is_tensor(value)} - _GIVEN
    if others:
        raise UserError(
            f"{name} gives its layers {', '.join(sorted(others))} beside hidden states, masks and positions"
        )
    ropes: list[RopeCall] = []
    rope_of: list[int] = []
    for call in calls:
        rope = next((rope for rope, output in made if output is call.get("position_embeddings")), None)
        if rope is None or len(call["position_embeddings"]) != 2:
            raise UserError(f"{name} gives its layers no cos and sin made by one of its modules: not supported")
        if rope not in ropes:
            ropes.append(rope)
        rope_of.append(ropes.index(rope))
    plain = len(embedded) == 1 and torch.equal(embedded[0], entered)
    layout = Layout(tuple(windows), tuple(ropes), tuple(rope_of), plain, _has_plain_logits(model))
    return layout, [call["attention_mask"] for call in calls]


class _StandIn(nn.Module):
    """Stands in for a layer: records its arguments, and returns the hidden states as they are."""

    def __init__(self, index: int, layer: nn.Module, calls: list[dict[str, Any]]) -> None:
        super().__init__()
        self._index = index
        self._calls = calls
        self._parameters_of_layer = inspect.signature(layer.forward)
        self.__dict__["_layer"] = layer  # not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        """Attributes that a model reads from its layers, such as their type, are the layer's."""
        return getattr(self.__dict__["_layer"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = self._parameters_of_layer.bind(*args, **kwargs).arguments
        self._calls.append({"index": self._index} | bound | bound.get("kwargs", {}))
        return bound["hidden_states"]


def _note_rope(name: str, made: list[tuple[RopeCall, Any]]) -> Callable[..., None]:
    """A forward hook that records a module's arguments and output."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        extras = {key: value for key, value in bound.items() if not torch.is_tensor(value)}
        if isinstance(output, tuple) and "position_ids" in bound:
            made.append((RopeCall(name, tuple(extras.items())), output))

    return hook


class _Gives(nn.Module):
    """Stands in for a module: returns the same value for all arguments."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._value


def _has_plain_logits(model: Any) -> bool:
    """Whether the output of `lm_head` reaches the caller unchanged."""
    # large and small values: a cap or a factor changes some of them in any dtype
    ramp = torch.linspace(-100, 100, 64, dtype=model.dtype, device=home_of(model))[None, None]
    hidden = torch.zeros(1, 1, model.config.hidden_size, dtype=model.dtype, device=home_of(model))
    with _in_place_of(model, "lm_head", _Gives(ramp)):
        return torch.equal(logits_of_normed(model, hidden), ramp)


def logits_of_normed(model: Any, normed: Tensor) -> Tensor:
    """[1, m, v] logits, by the model's own code after its last norm. normed: [1, m, w]."""
    # this output type also serves models without experts
    with _in_place_of(model, "model", _Gives(MoeModelOutputWithPast(last_hidden_state=normed))):
        # `forward`, as a user's hooks on the model are for the model's own runs
        return model.forward(inputs_embeds=normed, use_cache=False, return_dict=True).logits


def hidden_before_layers(model: Any, token_ids: Tensor, positions: Tensor) -> Tensor:
    """[1, m, w] hidden states before layer 1, by the model's own code. token_ids, positions: [m]."""
    inner = model.model
    with _in_place_of(inner, "layers", nn.ModuleList()), _in_place_of(inner, "norm", nn.Identity()):
        return inner(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True
        ).last_hidden_state


@contextmanager
def _in_place_of(parent: nn.Module, name: str, other: nn.Module) -> Iterator[None]:
    """Replace a submodule of `parent` by another one for a while."""
    modules = parent._modules
    own = modules[name]
    modules[name] = other
    try:
        yield
    finally:
        modules[name] = own
