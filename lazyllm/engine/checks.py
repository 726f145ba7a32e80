"""The start-up check of a model: the loop over layers and the model agree on a few tokens."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lazyllm.engine.architecture import check_surroundings
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.devices import main_device, replaced
from lazyllm.engine.flops import windows_of
from lazyllm.engine.inputs import Group, ScoreSpec
from lazyllm.engine.session import Session
from lazyllm.errors import UserError

log = logging.getLogger(__name__)

CHECKED_STEPS = 2  # decoding steps
CHECKED_WINDOW = 512  # tokens; of longer windows only the masks are checked (`architecture`)
HALVES = (torch.bfloat16, torch.float16)

_PASSED: WeakSet[PreTrainedModel] = WeakSet()
_CHECKING = RLock()  # a model may have other weights while it is checked
_NO_RUN = (RuntimeError, TypeError, AttributeError, KeyError)  # raised by layers that cannot run


@torch.inference_mode()
def check_same_as_model(model: PreTrainedModel) -> None:
    """Refuse a model whose logits the loop over layers does not reproduce. Once per model.

    `model(...)` runs a few tokens twice: with its cache, token by token as the loop does, and
    without a cache, all at once. So layers that keep a state besides K and V fail, and layers that
    mix tokens outside attention. In 16 bits rounding alone may differ by more than is allowed. Then
    the comparison is repeated in float32, a layer at a time, and only that refuses the model.
    Weights that float32 cannot hold, as quantised ones, leave the cause open: the model is
    accepted, with a warning.
    Raises UserError, also if a layer does not call transformers' attention functions, and
    FloatingPointError if the model's logits are not finite.
    """
    with _CHECKING:
        if model not in _PASSED:
            _check(model)
            _PASSED.add(model)


def _check(model: PreTrainedModel) -> None:
    check_surroundings(model)  # first, as it refuses kinds of layers with the best reason
    name, token_ids = type(model).__name__, _ordinary_tokens(model)
    difference, largest = _compare(model, token_ids)
    # rounding in bfloat16 may be more; float16 has three more bits
    share = 1e-2 if torch.finfo(model.dtype).eps < 1e-3 else 5e-2
    if not difference <= share * largest and model.dtype in HALVES:
        try:
            difference, largest = _compare_in_float32(model, token_ids)
        except _NotInFloat32Error as error:
            log.warning(
                "%s: running its layers one by one gives other logits than the model, by up to "
                "%.3g of %.3g. That may be rounding or an unsupported structure, and float32 "
                "cannot tell: %s. Compare method=baseline with model.generate before you trust "
                "other methods",
                name, difference, largest, error,
            )  # fmt: skip
            return
        share = 1e-2
    if not difference <= share * largest:
        raise UserError(
            f"{name} is not supported: running its layers one by one gives other logits than the "
            f"model (by up to {difference:.3g}), so it works on hidden states outside its layers, "
            "mixes tokens outside attention, or keeps a state besides K and V"
        )


def _ordinary_tokens(model: PreTrainedModel) -> Tensor:
    """Draw token ids [n] from the middle of the vocabulary, the same in each call.

    They exceed the shortest window up to `CHECKED_WINDOW`. The first ids of a vocabulary are often
    special tokens, whose huge activations multiply every rounding error.
    """
    windows = [window for window in windows_of(model.config) if window is not None]
    shortest = min(windows, default=CHECKED_WINDOW + 1)
    length = max(8, shortest + CHECKED_STEPS + 2) if shortest <= CHECKED_WINDOW else 8
    quarter, draw = model.config.vocab_size // 4, torch.Generator().manual_seed(0)
    ids = torch.randint(quarter, 3 * quarter + 1, (length,), generator=draw)
    return ids.to(main_device(model))


def _compare(model: PreTrainedModel, token_ids: Tensor) -> tuple[float, float]:
    """Return the largest difference of the loop's logits, and the largest of the model's."""
    name = type(model).__name__
    with open_decoder(model) as decoder:
        try:
            found = _logits_of_loop(decoder, token_ids)
        except torch.OutOfMemoryError:  # not the model's fault
            raise
        except _NO_RUN as error:
            raise UserError(f"the layers of {name} cannot be run one by one: {error}") from error
    steps, cache = list[Tensor](), None
    for tokens in _split(token_ids):
        output = model(tokens[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        steps.append(output.logits[0, -1])
        cache = output.past_key_values
    at_once = model(token_ids[None], logits_to_keep=1 + CHECKED_STEPS, use_cache=False).logits[0]
    expected = torch.stack([torch.stack(steps), at_once])
    if not expected.isfinite().all():
        raise FloatingPointError(f"{name}: the model's own logits are not finite (NaN or infinite)")
    return (found.to(expected.device) - expected).abs().max().item(), expected.abs().max().item()


def _logits_of_loop(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """Run the loop: [1 + CHECKED_STEPS, v] logits.

    Another prompt runs before the decoding steps, so that a state which layers keep is not theirs.
    """
    session, (prompt, *steps) = _session(decoder, len(token_ids)), _split(token_ids)
    logits = [session.prefill(prompt)]
    session.context.take_each()
    other = token_ids[:4].flip(0)
    _session(decoder, len(other)).prefill(_split(other)[0])
    for token in steps:
        logits.append(session.step(token))
        session.context.take_each()
    return torch.stack(logits)


def _session(decoder: Decoder, length: int) -> Session:
    """Start a session for `length` tokens, decoding steps included, scored in every layer."""
    layers, n = range(len(decoder.layers)), length - CHECKED_STEPS
    group = Group(layers, n, ScoreSpec(layers), score_in_decode=True)
    return Session(decoder, [group], n, CHECKED_STEPS)


def _split(token_ids: Tensor) -> tuple[Tensor, ...]:
    """Split tokens into a prompt and single tokens for the decoding steps."""
    return token_ids.split([len(token_ids) - CHECKED_STEPS, *[1] * CHECKED_STEPS])


class _NotInFloat32Error(Exception):
    """A model's weights cannot be used in float32."""


def _compare_in_float32(model: PreTrainedModel, token_ids: Tensor) -> tuple[float, float]:
    """Compare in float32, by eager attention, as FlashAttention takes no float32."""
    if _is_quantised(model):
        raise _NotInFloat32Error("its weights are quantised")
    try:
        with _in_float32(model), replaced(model.config, "_attn_implementation", "eager"):
            return _compare(model, token_ids)
    except torch.OutOfMemoryError:
        raise
    except (*_NO_RUN, UserError) as error:  # the same runs passed in the model's own dtype
        raise _NotInFloat32Error(str(error)) from error


def _is_quantised(model: Any) -> bool:
    """Say whether a matrix of a layer is no plain tensor of at least 16-bit floats."""
    weights = [weight for layer in model.model.layers for weight in _weights_of(layer, True)]
    return not all(
        type(weight.data) is Tensor and weight.is_floating_point() and weight.dtype.itemsize > 1
        for weight in weights
        if weight.dim() > 1
    )


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Let each part of the model compute in float32, with float32 weights only while it runs.

    The parts are the layers, and the modules with weights outside of them. So no more than a layer
    is held twice. On exit the model is as it was.
    """
    layers = [*model.model.layers]
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    narrow = dict[nn.Module, list[tuple[Tensor, Tensor]]]()  # {part that runs: weights, their data}

    def widen(part: nn.Module, *_: Any) -> None:
        weights = _weights_of(part, recurse=id(part) in inside)
        narrow[part] = [(weight, weight.data) for weight in weights if weight.dtype in HALVES]
        for weight, data in narrow[part]:
            weight.data = data.float()

    def restore(part: nn.Module, *_: Any) -> None:
        for weight, data in narrow.pop(part):
            weight.data = data

    with ExitStack() as stack:
        for part in (*layers, *outside):
            stack.enter_context(part.register_forward_pre_hook(widen, prepend=True))
            stack.enter_context(part.register_forward_hook(restore))
        try:
            yield
        finally:
            for part in [*narrow]:  # those that raised
                restore(part)


def _weights_of(module: nn.Module, recurse: bool) -> list[Tensor]:
    return [*module.parameters(recurse), *module.buffers(recurse)]
