"""LazyLLM, and the same selections with every K and V computed anew in each step.

LazyLLM computes a token's K and V in a layer once, among the tokens of that step. Later steps read
them, though other tokens are selected then. What does this reuse change?

    python -m tests.recomputed OUT.csv model=smollm2 dataset=all subset=mini ... 'arms=[...]'

takes the arguments of a run, and writes a row for each prompt and LazyLLM arm: KLs in nats, means
over the baseline's own answer.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import lazyllm
from eval.run.answer import mean_kl
from lazyllm.engine.depth import Depth
from lazyllm.engine.generation import Forced, Generation, Tokens, answer
from lazyllm.engine.inputs import Boundary
from lazyllm.methods import Baseline, Lazy, Method, Prune, ScoreSpec

COLUMNS = (
    "dataset", "id", "arm", "prompt_tokens", "tokens", "revived_per_layer",
    "baseline_to_reused", "baseline_to_recomputed", "recomputed_to_reused",
)  # fmt: skip


@dataclass(frozen=True)
class Given(Prune):
    """Keeps given tokens: {layer, from 1: their ascending positions, the last one among them}."""

    tokens: Any

    def kept(self, depth: Depth, n: int) -> Mapping[int, int]:
        return {layer: len(positions) for layer, positions in self.tokens.items()}

    def score_spec(self, layers: range, depth: Depth) -> ScoreSpec:
        return ScoreSpec()

    def score(self, at: Boundary, recorded: list[Tensor]) -> Tensor:
        return torch.isin(at.positions, torch.tensor(self.tokens[at.layer])).double()


def force(
    model: PreTrainedModel, prompt: Tokens, method: Method, token_ids: Sequence[int]
) -> tuple[Tensor, Generation]:
    """Return the logits [t, v] before each of t tokens, if these are the answer, and its record."""
    sampler = Forced(token_ids)
    forced = answer(model, Generation(model, prompt, method, len(token_ids), sampler))
    return torch.stack(sampler.logits).double(), forced


def recompute(
    model: PreTrainedModel,
    prompt: Sequence[int],
    token_ids: Sequence[int],
    selected: Sequence[Mapping[int, Sequence[int]]],
) -> Tensor:
    """Return logits [t, v] as `force` does, each from a prefill of the text so far.

    selected: of each step, as in `Generation.selected`.
    """
    texts = ([*prompt, *token_ids[:step]] for step in range(len(token_ids)))
    return torch.stack(
        [
            lazyllm.generate(model, text, Given(tokens), 1, ()).first_logits.double()
            for text, tokens in zip(texts, selected, strict=True)
        ]
    )


def kl(wanted: Tensor, other: Tensor) -> float:
    """KL divergence in nats of `other` from `wanted`, both logits [t, v], mean over t."""
    return mean_kl(wanted.log_softmax(-1), other.log_softmax(-1))


def main(out: str, arguments: Sequence[str]) -> None:
    from eval.compose import read
    from eval.run.prepare import prepare

    run = prepare(read(arguments))
    model = lazyllm.load_model(run.config.model.name, dtype=run.spec.dtype)[0]
    with Path(out).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for prompt in run.prompts:
            given = prompt.as_input()
            whole = lazyllm.generate(model, given, Baseline(), prompt.max_new_tokens).token_ids
            baseline, _ = force(model, given, Baseline(), whole)
            for arm in run.arms:
                method = run.methods[arm.label, prompt.dataset.name]
                if not isinstance(method, Lazy):
                    continue
                reused, forced = force(model, given, method, whole)
                anew = recompute(model, given.token_ids.tolist(), whole, forced.selected)
                about = [*prompt.key, arm.label, len(given), len(whole), forced.revived.mean()]
                kls = [kl(baseline, reused), kl(baseline, anew), kl(anew, reused)]
                writer.writerow(dict(zip(COLUMNS, [*about, *kls], strict=True)))
                file.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
