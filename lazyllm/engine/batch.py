"""Several generations that decode together: each step runs their tokens through the layers as one sequence.

Nothing is padded: norms, projections and MLPs run [1, sum of m, w], m tokens of each generation, so a step reads the
weights once. Each generation attends to its own KV cache. When one ends, the next request takes its place.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lazyllm.engine.checks import check_same_as_model
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.generation import (
    Generation,
    Greedy,
    Request,
    RunningGeneration,
    advance,
    begin,
    end_ids_of,
    make_request,
)
from lazyllm.engine.inputs import Prompt
from lazyllm.engine.method import Method
from lazyllm.errors import UserError

BATCH_SIZE = 8  # generations that decode together by default


def generate_many(
    model: PreTrainedModel,
    prompts: Sequence[Tensor | Sequence[int] | Prompt],
    method: Method,
    max_new_tokens: int = 64,
    eos_token_ids: Sequence[int] | None = None,
    min_new_tokens: int = 0,
    batch_size: int = BATCH_SIZE,
) -> Iterator[tuple[int, Generation]]:
    """Continue prompts greedily, several at a time: (index in `prompts`, its `Generation`) as they end, in any order.

    batch_size: generations that decode together, 1 or more; memory is the sum of theirs. Other arguments are those of
        `generate`.

    Answers, selections, counts and bytes are those of `generate`, up to rounding: products of several tokens may round
    otherwise than those of one. Prompts are prefilled one by one, the longest first, while the others wait. So `ttft_s`
    is a generation's own, but `decode_step_s` and `total_s` are of all together, later prefills included.

    Raises as `generate`; also UserError for a method that cannot decode in a batch, unless `batch_size` is 1. Between
    two results, the model is as it was.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: give a whole number of 1 or more")
    end_ids = end_ids_of(model) if eos_token_ids is None else eos_token_ids
    requests = [make_request(model, ids, method, max_new_tokens, Greedy(end_ids, min_new_tokens)) for ids in prompts]
    return generate_requests(model, requests, batch_size)


def generate_requests(
    model: PreTrainedModel, requests: Sequence[Request], batch_size: int
) -> Iterator[tuple[int, Generation]]:
    """(index, Generation) of the requests as they end, at most `batch_size` at a time.

    The longest starts first, but with a batch size of 1 they run in order. Raises as `generate`, and as the samplers.
    """
    waiting = sorted(requests, key=lambda request: -len(request.prompt)) if batch_size > 1 else [*requests]
    batch = Batch(model, batch_size)
    while waiting or batch.running:
        while waiting and len(batch.running) < batch_size:
            batch.add(waiting.pop(0))
        for request, generation in batch.run():
            yield requests.index(request), generation


class Batch:
    """The generations that decode together.

    running: those that have not ended.
    size: the most that the caller adds, which is not checked here; with 1, any method can be added.

    Between two calls the model is as it was. After an error the generations cannot go on.
    """

    def __init__(self, model: PreTrainedModel, size: int) -> None:
        self.running: list[RunningGeneration] = []
        self._model = model
        self._size = size
        self._decoder: Decoder | None = None

    @torch.inference_mode()
    def add(self, request: Request) -> None:
        """Prefill a request's prompt alone and choose its first token. Raises as `generate`."""
        method = request.method
        if self._size > 1 and not method.can_batch:
            raise UserError(f"{method.label} decodes in a way of its own, so it cannot be batched: give batch_size=1")
        check_same_as_model(self._model)
        method.prepare(self._model)
        with open_decoder(self._model, self._decoder) as self._decoder:
            self.running.append(begin(self._decoder, request))

    @torch.inference_mode()
    def run(self) -> list[tuple[Request, Generation]]:
        """Decode until one or more generations are done; these leave the batch. Raises as `generate`."""
        with open_decoder(self._model, self._decoder):
            while not any(generation.is_done for generation in self.running):
                advance(self.running)
        done = [generation for generation in self.running if generation.is_done]
        self.running = [generation for generation in self.running if not generation.is_done]
        return [(generation.request, generation.result()) for generation in done]
