"""The start-up check of a model: the loop over layers and the model itself agree on a few tokens."""

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
CHECKED_WINDOW = 512  # tokens; for longer windows only the masks are checked (`lazyllm.engine.architecture`)
HALVES = (torch.bfloat16, torch.float16)

_PASSED: WeakSet[PreTrainedModel] = WeakSet()
_CHECKING = RLock()  # a model may have other weights while it is checked, so checks wait for one another
_NO_RUN = (RuntimeError, TypeError, AttributeError, KeyError)  # what a layer that cannot be run raises


@torch.inference_mode()
def check_same_as_model(model: PreTrainedModel) -> None:
    """Run a few tokens through the loop over layers and through `model(...)`: the logits must agree. Once per model.

    `model(...)` runs twice: with its own cache, token by token as the loop does, and without a cache, all tokens at
    once. So layers that keep a state besides K and V fail, and layers that mix tokens outside attention.
    In bfloat16 and float16 rounding alone may differ by more than is allowed. Then the comparison is repeated in
    float32, a layer at a time, and only that refuses the model. Weights that float32 cannot hold, as quantised ones,
    leave the cause open: the model is accepted, with a warning.
    Raises UserError if the logits differ, or if a layer does not call transformers' attention functions;
    FloatingPointError if the model's own logits are not finite.
    """
    with _CHECKING:
        if model not in _PASSED:
            _check(model)
            _PASSED.add(model)


def _check(model: PreTrainedModel) -> None:
    """Check as `check_same_as_model` says, whether the model has passed before or not."""
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
                "%s: running its layers one by one gives other logits than the model, by up to %.3g of %.3g. That may "
                "be rounding or an unsupported structure, and float32 cannot tell: %s. Compare method=baseline with "
                "model.generate before you trust other methods",
                name, difference, largest, error,
            )  # fmt: skip
            return
        share = 1e-2
    if not difference <= share * largest:
        raise UserError(
            f"{name} is not supported: running its layers one by one gives other logits than the model (by up to "
            f"{difference:.3g}), so it works on hidden states outside its layers, mixes tokens outside attention, or "
            "keeps a state besides K and V"
        )


def _ordinary_tokens(model: PreTrainedModel) -> Tensor:
    """Draw [n] token ids from the middle of the vocabulary, the same in each call.

    They exceed the shortest sliding window if it has at most `CHECKED_WINDOW` tokens. The first ids of a vocabulary are
    often special tokens, whose huge activations multiply every rounding error.
    """
    shortest = min((window for window in windows_of(model.config) if window is not None), default=None)
    length = 8
    if shortest is not None and shortest <= CHECKED_WINDOW:
        length = max(length, shortest + CHECKED_STEPS + 2)
    quarter, draw = model.config.vocab_size // 4, torch.Generator().manual_seed(0)
    return torch.randint(quarter, 3 * quarter + 1, (length,), generator=draw).to(main_device(model))


def _compare(model: PreTrainedModel, token_ids: Tensor) -> tuple[float, float]:
    """Return the largest difference between the loop's logits and the model's, and the largest of the model's.

    The logits are those of the prompt's last token and of the decoding steps. Raises as `check_same_as_model`.
    """
    name = type(model).__name__
    with open_decoder(model) as decoder:
        try:
            found = _logits_of_loop(decoder, token_ids)
        except torch.OutOfMemoryError:  # not the model's fault
            raise
        except _NO_RUN as error:
            raise UserError(f"the layers of {name} cannot be run one by one: {error}") from error
    expected = torch.stack([_logits_of_cached_steps(model, token_ids), _logits_at_once(model, token_ids)])
    if not expected.isfinite().all():
        raise FloatingPointError(f"{name}: the model's own logits are not finite (NaN or infinite)")
    return (found.to(expected.device) - expected).abs().max().item(), expected.abs().max().item()


def _logits_of_loop(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """Run the loop: [1 + CHECKED_STEPS, v] logits.

    Another prompt runs before the decoding steps, so that a state which layers keep from call to call is not theirs.
    """
    session, (prompt, *steps) = _session(decoder, len(token_ids)), _in_parts(token_ids)
    logits = [session.prefill(prompt)]
    session.context.take_each()  # raises RuntimeError if a layer did not call the installed attention function
    other = token_ids[:4].flip(0)
    _session(decoder, len(other)).prefill(_in_parts(other)[0])
    for token in steps:
        logits.append(session.step(token))
        session.context.take_each()
    return torch.stack(logits)


def _session(decoder: Decoder, length: int) -> Session:
    """Return a session for `length` tokens, those of the decoding steps included, that scores them in every layer."""
    layers, n = range(len(decoder.layers)), length - CHECKED_STEPS
    return Session(decoder, [Group(layers, n, ScoreSpec(layers), score_in_decode=True)], n, CHECKED_STEPS)


def _in_parts(token_ids: Tensor) -> tuple[Tensor, ...]:
    """Split tokens into a prompt and single tokens for the decoding steps."""
    return token_ids.split([len(token_ids) - CHECKED_STEPS, *[1] * CHECKED_STEPS])


def _logits_of_cached_steps(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Run the model's own prefill and decoding steps, with its own cache: [1 + CHECKED_STEPS, v] logits."""
    logits, cache = list[Tensor](), None
    for tokens in _in_parts(token_ids):
        output = model(tokens[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits.append(output.logits[0, -1])
        cache = output.past_key_values
    return torch.stack(logits)


def _logits_at_once(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Run all tokens through the model itself, without a cache: [1 + CHECKED_STEPS, v] logits."""
    return model(token_ids[None], logits_to_keep=1 + CHECKED_STEPS, use_cache=False).logits[0]


class _NotInFloat32Error(Exception):
    """A model's weights cannot be used in float32."""


def _compare_in_float32(model: PreTrainedModel, token_ids: Tensor) -> tuple[float, float]:
    """Compare as `_compare` does, in float32 and by eager attention, as FlashAttention takes no float32.

    Raises _NotInFloat32Error if the model cannot run so.
    """
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
    """Return whether a matrix of a layer is no plain tensor of at least 16-bit floats. GGUF files are read as such."""
    matrices = [weight for layer in model.model.layers for weight in _weights_of(layer, True) if weight.dim() > 1]
    return not all(
        type(weight.data) is Tensor and weight.is_floating_point() and weight.dtype.itemsize > 1 for weight in matrices
    )


@contextmanager
def _in_float32(model: Any) -> Iterator[None]:
    """Within this context, each part of the model computes in float32, and has float32 weights only while it runs.

    The parts are the layers, and the modules with weights outside of them. So no more than a layer is held twice, and
    every layer takes part. On exit the model is as it was.
    """
    layers = [*model.model.layers]
    inside = {id(module) for layer in layers for module in layer.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    narrow = dict[nn.Module, list[tuple[Tensor, Tensor]]]()  # {a part that runs: its weights with their data}

    def widen(part: nn.Module, *_: Any) -> None:
        recurse = id(part) in inside
        weights = [weight for weight in _weights_of(part, recurse) if weight.dtype in HALVES]
        narrow[part] = [(weight, weight.data) for weight in weights]
        for weight in weights:
            weight.data = weight.data.float()

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
