"""transformers' own `generate`, as an arm beside the baseline: it shows that the baseline is not slowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lazyllm.engine.inputs import Prompt
from lazyllm.errors import UserError
from lazyllm.methods.baseline import Baseline

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lazyllm.engine.decoder import Decoder
    from lazyllm.engine.generation import Generation
    from lazyllm.engine.session import Session


@dataclass(frozen=True)
class Transformers(Baseline):
    """The model's `generate`, greedy, without our loop, cache and attention. Its tokens are the baseline's."""

    label = "transformers"
    order = 0
    colour = "#7F7F7F"
    marker = "x"
    can_batch = False
    answers_itself = True

    def whole_answer(
        self, model: PreTrainedModel, prompt: Prompt, max_new_tokens: int, end_ids: Sequence[int], min_new_tokens: int
    ) -> Generation:
        """One answer, timed as `lazyllm.generate` times it: by a streamer, which gets each token once it is chosen."""
        import numpy as np
        import torch
        from transformers import GenerationConfig
        from transformers.generation.streamers import BaseStreamer

        from lazyllm.engine.devices import devices_of, read_clock
        from lazyllm.engine.generation import Generation

        devices, first_logits = devices_of(model), list[torch.Tensor]()

        class Clock(BaseStreamer):
            def __init__(self) -> None:
                self.times = list[float]()

            def put(self, value: Any) -> None:  # the prompt first
                self.times.append(read_clock(*devices))

            def end(self) -> None:
                pass

        def keep_first(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if not first_logits:
                first_logits.append(scores[0].clone())
            if end_ids and input_ids.shape[1] < len(prompt) + min_new_tokens:
                scores[:, list(end_ids)] = float("-inf")  # its own rule would come before the logits are kept
            return scores

        clock, token_ids = Clock(), prompt.token_ids[None].to(devices[0])
        config = GenerationConfig(
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(end_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        began, generate = read_clock(*devices), model.generate
        out: Any = generate(  # type: ignore[operator]
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            generation_config=config,
            streamer=clock,
            logits_processor=[keep_first],
        )
        times, n, layers = clock.times[1:], len(prompt), model.config.num_hidden_layers
        kept = [tensor for layer in out.past_key_values.layers for tensor in (layer.keys, layer.values)]
        return Generation(
            token_ids=out.sequences[0, n:].tolist(),
            first_logits=first_logits[0],
            ttft_s=times[0] - began,
            scoring_s=0.0,
            total_s=times[-1] - began,
            decode_step_s=[after - before for before, after in pairwise(times)],
            computed=np.full((len(times), layers), n),
            selected=[{} for _ in times],
            revived=np.zeros(layers, dtype=int),
            kv_bytes=sum(tensor.numel() * tensor.element_size() for tensor in kept),
            aux_bytes=0,
            prompt_tokens=n,
        )

    def start(self, decoder: Decoder, prompt: Prompt, max_new_tokens: int) -> Session:
        raise UserError(
            "transformers' own generate gives one whole answer to one prompt: leave out turns, batches and "
            "fidelity=answer, or the arm"
        )
