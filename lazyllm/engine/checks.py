"""The start-up check of a model: the loop over layers and the model itself agree on a few tokens."""

from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.flops import windows_of
from lazyllm.engine.inputs import Group, ScoreSpec
from lazyllm.engine.session import Session
from lazyllm.errors import UserError

CHECKED_STEPS = 2  # decoding steps
CHECKED_WINDOW = 512  # tokens; for longer windows only the masks are checked (`lazyllm.engine.architecture`)

_PASSED: WeakSet[PreTrainedModel] = WeakSet()


@torch.inference_mode()
def check_same_as_model(model: PreTrainedModel) -> None:
    """Run a few tokens through the loop over layers and through `model(...)`: the logits must agree. Once per model.

    Most tokens run as a prompt, the others as decoding steps. So layers that keep a state besides K and V, or mix
    tokens outside attention, fail. The tokens exceed the shortest sliding window if it has at most `CHECKED_WINDOW`.
    Raises UserError if the logits differ, or if a layer does not call transformers' attention functions;
    FloatingPointError if the model's own logits are not finite.
    """
    if model in _PASSED:
        return
    name, length = type(model).__name__, 8
    with open_decoder(model) as decoder:
        shortest = min((window for window in windows_of(model.config) if window is not None), default=None)
        if shortest is not None and shortest <= CHECKED_WINDOW:
            length = max(length, shortest + CHECKED_STEPS + 2)
        token_ids = torch.arange(length, device=decoder.device) % model.config.vocab_size
        try:
            ours = _logits_of_loop(decoder, token_ids)
        except torch.OutOfMemoryError:  # not the model's fault
            raise
        except (RuntimeError, TypeError, AttributeError, KeyError) as error:
            raise UserError(f"the layers of {name} cannot be run one by one: {error}") from error
    expected = model(token_ids[None], logits_to_keep=1 + CHECKED_STEPS, use_cache=False).logits[0].to(ours.device)
    if not expected.isfinite().all():
        raise FloatingPointError(f"{name}: the model's own logits are not finite (NaN or infinite)")
    worst = (ours - expected).abs().max().item()
    share = 1e-2 if torch.finfo(model.dtype).eps < 1e-3 else 5e-2  # tolerance, of the largest logit; 5e-2 in bfloat16
    if not worst <= share * expected.abs().max().item():
        raise UserError(
            f"{name} is not supported: running its layers one by one gives other logits than the model (by up to "
            f"{worst:.3g}), so it works on hidden states outside its layers, or mixes tokens outside attention"
        )
    _PASSED.add(model)


def _logits_of_loop(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """[1 + CHECKED_STEPS, v] logits of the prompt's last token and of the decoding steps."""
    n, layers = token_ids.shape[0] - CHECKED_STEPS, range(len(decoder.layers))
    session = Session(decoder, [Group(layers, n, ScoreSpec(layers), score_in_decode=True)], n, CHECKED_STEPS)
    logits = []
    for tokens in token_ids.split([n, *[1] * CHECKED_STEPS]):
        logits.append(session.step(tokens) if logits else session.prefill(tokens))
        session.context.take_each()  # raises RuntimeError if a layer did not call the installed attention function
    return torch.stack(logits)
