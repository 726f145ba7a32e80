"""Self-information against one whole forward pass per token, windows by their rule, FLOPs by
hand.
"""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from lazyllm.engine.decoder import open_decoder
from lazyllm.methods.prompt_compression import scoring as module
from lazyllm.methods.prompt_compression.scoring import carried_over, scoring_flops, self_information
from tests.reference import ARCHITECTURES, random_model

BOS = 5


def found(model: PreTrainedModel, token_ids: list[int], window: int | None = None) -> np.ndarray:
    with torch.inference_mode(), open_decoder(model) as decoder:
        return self_information(decoder, torch.tensor(token_ids), window)


def slow(model: PreTrainedModel, token_ids: list[int], window: int, bos: int | None) -> list[float]:
    """One forward pass of transformers' model per token, over just what that token may see."""
    sequence = token_ids if bos is None else [bos, *token_ids]
    info = [np.log(model.config.vocab_size)] if bos is None else []
    for place in range(1, len(sequence)):
        # the first window scores the first `window` tokens; each of the next ones scores the
        # following `new` tokens
        new = window - window // 2
        start = 0 if place < window else (place - window) // new * new + window - window // 2
        with torch.inference_mode():
            logits = model(torch.tensor([sequence[start:place]])).logits[0, -1].numpy()
        shifted = logits - logits.max()
        info.append(float(np.log(np.exp(shifted).sum()) - shifted[sequence[place]]))
    return info


@pytest.mark.parametrize(
    ("architecture", "attention"),
    [*((name, "sdpa") for name in ARCHITECTURES), (ARCHITECTURES[0], "eager")],
)
def test_self_information_is_that_of_one_forward_pass_per_token(
    architecture: str, attention: str
) -> None:
    draw = np.random.default_rng(len(architecture))
    for bos, window in (
        (None, 512),
        (BOS, 512),
        (None, 7),
        (BOS, 8),
        (BOS, 2),
        (None, 3),
        (BOS, 24),
        (BOS, 25),
    ):
        model = random_model(
            architecture, 1, num_layers=2, attn_implementation=attention, bos_token_id=bos
        )
        token_ids = draw.integers(0, 97, 24).tolist()
        # eager attention rounds its softmax to float32
        tolerance = 1e-9 if attention == "sdpa" else 1e-4
        np.testing.assert_allclose(
            found(model, token_ids, window),
            slow(model, token_ids, window, bos),
            rtol=0,
            atol=tolerance,
        )


@pytest.mark.parametrize("chunk", [1, 19, 20])
def test_chunks_change_nothing_and_bound_the_logits(chunk: int, monkeypatch) -> None:
    model = random_model("llama", 0, num_layers=2, bos_token_id=BOS)
    token_ids = np.random.default_rng(0).integers(0, 97, 40).tolist()
    whole = found(model, token_ids, 20)
    rows: list[int] = []
    hook = model.lm_head.register_forward_hook(lambda module, args, out: rows.append(out.shape[-2]))
    monkeypatch.setattr(module, "CHUNK", chunk)
    np.testing.assert_allclose(found(model, token_ids, 20), whole, rtol=0, atol=1e-10)
    hook.remove()
    assert max(rows) == min(chunk, 19)  # the first window's first token is BOS, which is not scored
    assert sum(rows) == 40


def test_half_precision_is_compared_in_float32() -> None:
    """Scores computed in bfloat16 are rounded like those in float32."""
    model = random_model("llama", 0, num_layers=2, float64_throughout=False).to(torch.bfloat16)
    info = found(model, [1, 2, 3])
    assert np.array_equal(info, info.astype(np.float32))
    assert not torch.equal(torch.tensor(info).bfloat16().double(), torch.tensor(info))


def test_flops_by_hand() -> None:
    """width 48, 4 query and 2 key heads of 12, MLP 80, vocabulary 97, 2 layers."""
    config = random_model("llama", 0, num_layers=2, head_dim=12, bos_token_id=BOS).config
    token = 2 * (48 * 12 * (4 + 2 + 2 + 4) + 3 * 48 * 80)
    pair = 2 * 2 * 4 * 12
    logits = 2 * 48 * 97

    def run(tokens: int, scored: int) -> int:
        return 2 * (tokens * token + tokens * (tokens + 1) // 2 * pair) + scored * logits

    # BOS and ten tokens, of which the last one is only predicted
    assert scoring_flops(config, 10) == run(10, 10)
    # windows 0-7, 4-11 of BOS and eleven tokens: seven scored, then four
    assert scoring_flops(config, 11, window=8) == run(7, 7) + run(7, 4)


def test_carried_over_by_hand() -> None:
    # "ab cd": tokens ab, " c", d  ->  a, "b ", cd
    info = carried_over(
        np.array([4.0, 6.0, 1.0]),
        np.array([[0, 2], [2, 4], [4, 5]]),
        np.array([[0, 1], [1, 3], [3, 5]]),
    )
    assert info.tolist() == [2.0, 2.0 + 3.0, 3.0 + 1.0]
    # one character of three byte tokens, which another tokenizer writes as two
    info = carried_over(
        np.array([1.0, 2.0, 3.0]), np.array([[0, 1]] * 3), np.array([[0, 1], [0, 1]])
    )
    assert info.tolist() == [3.0, 3.0]
    # a token without characters counts for the next one
    info = carried_over(
        np.array([1.0, 2.0]), np.array([[0, 0], [0, 2]]), np.array([[0, 1], [1, 2]])
    )
    assert info.tolist() == [2.0, 1.0]
