"""What this device reaches at best: the rate that a prefill's arithmetic is held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from lazyllm.engine.devices import read_clock


def product_rate(model: PreTrainedModel, n: int) -> float:
    """FLOP/s of one product of n tokens with a matrix of the MLP's, by PyTorch's `linear`."""
    width, mlp = model.config.hidden_size, model.config.intermediate_size
    draw = torch.Generator(model.device).manual_seed(0)
    rows = torch.rand(n, width, device=model.device, generator=draw).to(model.dtype)
    weight = torch.rand(mlp, width, device=model.device, generator=draw).to(model.dtype)
    F.linear(rows[:1], weight)
    start = read_clock(model.device)
    repeats = 10 if model.device.type != "cpu" else 1
    for _ in range(repeats):
        F.linear(rows, weight)
    return repeats * 2 * n * width * mlp / (read_clock(model.device) - start)
