"""How much a model's next tokens attend to each prompt token: the scores of SpecPrefill.

Notation:
    n  prompt tokens      h  query heads      s  stored tokens
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lazyllm.engine.decoder import Decoder
from lazyllm.engine.generation import end_ids_of
from lazyllm.engine.inputs import Group, ScoreSpec
from lazyllm.engine.session import Session


def look_ahead(decoder: Decoder, token_ids: Tensor, queries: int, pool: int) -> Tensor:
    """Score the prompt's tokens [n]: the mean of `score_of_query` over queries.

    decoder: the open model, which looks ahead greedily. token_ids: [n]. queries: number of queries:
    the last prompt token and the first generated ones. An end token of the model and later tokens
    do not count. Only layers that see the whole prompt score, if there are any. Never waits for the
    device: all steps run, and those from an end token on are left out of the mean.
    """
    n, depth = token_ids.shape[0], decoder.depth
    wanted = ScoreSpec([layer - 1 for layer in depth.full], raw=True, per_head=True)
    group = Group(range(depth.count), n, wanted, score_in_decode=True)
    session = Session(decoder, [group], n, queries)
    logits = session.prefill(token_ids.to(decoder.device))
    scores = score_of_query(session.context.take_each(), n, pool)
    # whether the query counts, 1 or 0; the number of those that do
    counts = count = scores.new_ones(())
    ends = torch.zeros_like(logits, dtype=torch.bool)
    for end_id in end_ids_of(decoder.model):
        if 0 <= end_id < len(ends):  # some configs write -1 for none
            ends[end_id] = True
    for _ in range(queries - 1):
        token = logits.argmax(dim=0, keepdim=True)
        counts = counts * ~ends[token][0]
        logits = session.step(token)
        scores = scores + counts * score_of_query(session.context.take_each(), n, pool)
        count = count + counts
    return scores / count


def score_of_query(recorded: list[Tensor], n: int, pool: int) -> Tensor:
    """Score how much one query attends to each prompt token, [n].

    recorded: for each layer, its attention logits [h, s]. Softmax over the prompt's keys (0 if the
    query sees none), average pooling along the prompt with zeros around it, maximum over layers and
    heads.
    """
    layers = []
    for logits in recorded:
        shares = logits[:, :n].softmax(dim=-1).nan_to_num(nan=0.0)  # NaN: a row of -inf
        pooled = F.avg_pool1d(shares[None], pool, stride=1, padding=pool // 2)[0]
        layers.append(pooled.amax(dim=0))
    return torch.stack(layers).amax(dim=0)
