"""An obvious, slow, independent re-implementation of LazyLLM (arXiv 2407.14057, section 3), for the tests only.

Nothing here is fast and nothing is shared with the ``lazyllm`` package: tokens live in dictionaries (position ->
hidden vector; per layer, position -> key and value), attention is computed for one query token at a time, and the whole
forward pass (RMSNorm, RoPE, grouped-query attention, SwiGLU) is written out in float64 numpy from the model's weights.
``tests/test_reference.py`` proves it equal to transformers' own forward pass, and the pruning equal to a formulation
with dense, masked attention and no cache.

Notation: ``N`` prompt tokens, ``L`` layers, ``H`` query heads, ``G`` key/value heads, ``d`` head width, ``D`` model
width, ``V`` vocabulary. Layers and pruning layers are counted from 1, positions from 0. Boundary l comes after layer l.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


# ---------------------------------------------------------------------------------------------------------------------
# The model, by hand
# ---------------------------------------------------------------------------------------------------------------------


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMSNorm of one vector (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight."""
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def _softmax(x: np.ndarray) -> np.ndarray:
    """Softmax of one vector."""
    e = np.exp(x - np.max(x))
    return e / np.sum(e)


def _silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x), elementwise."""
    return x / (1.0 + np.exp(-x))


class HandModel:
    """The weights of a Llama, Mistral, Qwen2 or Qwen3 model in float64 numpy, and one token's way through a layer.

    Args:
        model: a Hugging Face causal language model of one of these architectures, full attention in every layer,
            default RoPE. Its weights are copied; the model is neither run nor changed.

    Raises:
        ValueError: the model has a feature that is not written out here.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        if config.model_type not in ARCHITECTURES:
            raise ValueError(f"model type {config.model_type!r} is not one of {ARCHITECTURES}")
        if config.hidden_act != "silu":
            raise ValueError(f"activation {config.hidden_act!r} is not 'silu'")
        layer_types = getattr(config, "layer_types", None) or []
        sliding_mistral = config.model_type == "mistral" and config.sliding_window is not None
        if sliding_mistral or any(kind != "full_attention" for kind in layer_types):
            raise ValueError("the reference knows full attention only, no sliding window")
        rope = config.rope_parameters
        if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"the reference knows default RoPE only, not {rope}")

        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.eps: float = config.rms_norm_eps
        self.theta: float = rope["rope_theta"]
        self.weights = {
            name: tensor.detach().cpu().to(torch.float64).numpy().copy() for name, tensor in model.state_dict().items()
        }
        self.head_dim: int = self.weights["model.layers.0.self_attn.q_proj.weight"].shape[0] // self.num_heads

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """W x + b, without b where the layer has none."""
        y = self.weights[f"{name}.weight"] @ x
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return _rms_norm(x, self.weights[f"{name}.weight"], self.eps)

    def _head_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """Qwen3's norm of each head's query or key (x: [heads, d]); the other architectures have none."""
        if f"{name}.weight" not in self.weights:
            return x
        return np.stack([self._norm(name, head) for head in x])

    def _rope(self, x: np.ndarray, position: int) -> np.ndarray:
        """Rotary position embedding (Su et al. 2021), rotate-half convention. x: [heads, d]."""
        half = self.head_dim // 2
        angle = position / self.theta ** (2.0 * np.arange(half) / self.head_dim)  # [d/2]
        first, second = x[:, :half], x[:, half:]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=1
        )

    def embed(self, token_id: int) -> np.ndarray:
        """The hidden state [D] that enters layer 1."""
        return self.weights["model.embed_tokens.weight"][token_id]

    def key_value(self, layer: int, hidden: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Key (after RoPE) and value of one token in one layer. hidden: [D]; returns two arrays [G, d]."""
        attention = f"model.layers.{layer - 1}.self_attn"
        x = self._norm(f"model.layers.{layer - 1}.input_layernorm", hidden)
        k = self._linear(f"{attention}.k_proj", x).reshape(self.num_kv_heads, self.head_dim)
        v = self._linear(f"{attention}.v_proj", x).reshape(self.num_kv_heads, self.head_dim)
        return self._rope(self._head_norm(f"{attention}.k_norm", k), position), v

    def layer(
        self, layer: int, hidden: np.ndarray, position: int, attended: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """One token through one layer.

        Args:
            layer: the layer, from 1.
            hidden: the token's hidden state before the layer, [D].
            position: the token's position in the text.
            attended: key and value, each [G, d], of every token it attends to (itself among them), ``t`` of them.

        Returns:
            The hidden state after the layer, [D], and the attention probabilities, [H, t].
        """
        prefix = f"model.layers.{layer - 1}"
        x = self._norm(f"{prefix}.input_layernorm", hidden)
        q = self._linear(f"{prefix}.self_attn.q_proj", x).reshape(self.num_heads, self.head_dim)
        q = self._rope(self._head_norm(f"{prefix}.self_attn.q_norm", q), position)
        probabilities, outputs = [], []
        for head in range(self.num_heads):
            kv_head = head // (self.num_heads // self.num_kv_heads)
            keys = np.stack([k[kv_head] for k, _ in attended])  # [t, d]
            values = np.stack([v[kv_head] for _, v in attended])  # [t, d]
            p = _softmax(keys @ q[head] / np.sqrt(self.head_dim))
            probabilities.append(p)
            outputs.append(p @ values)
        hidden = hidden + self._linear(f"{prefix}.self_attn.o_proj", np.concatenate(outputs))
        x = self._norm(f"{prefix}.post_attention_layernorm", hidden)
        x = _silu(self._linear(f"{prefix}.mlp.gate_proj", x)) * self._linear(f"{prefix}.mlp.up_proj", x)
        return hidden + self._linear(f"{prefix}.mlp.down_proj", x), np.stack(probabilities)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Final norm and language-model head: hidden state after the last layer [D] -> [V]."""
        return self._linear("lm_head", self._norm("model.norm", hidden))


def forward_reference(model: PreTrainedModel, input_ids: Sequence[int]) -> np.ndarray:
    """Logits [N, V] of all positions, without any pruning: what ``model(input_ids).logits[0]`` should be."""
    hand = HandModel(model)
    hidden = {position: hand.embed(token) for position, token in enumerate(input_ids)}
    for layer in range(1, hand.num_layers + 1):
        kv = {p: hand.key_value(layer, hidden[p], p) for p in hidden}
        hidden = {p: hand.layer(layer, hidden[p], p, [kv[other] for other in kv if other <= p])[0] for p in hidden}
    return np.stack([hand.logits(hidden[p]) for p in sorted(hidden)])


# ---------------------------------------------------------------------------------------------------------------------
# The method
# ---------------------------------------------------------------------------------------------------------------------


def keep_count(ratio: float, n: int) -> int:
    """ceil(ratio * n), with the ratio taken as the decimal number it was written as (0.55 of 20 is 11, not 12)."""
    return ceil(Fraction(str(ratio)) * n)


@dataclass
class ReferenceOutput:
    """What :func:`lazy_reference` returns.

    Attributes:
        token_ids: the generated tokens, the end token (where reached) included; one per step.
        logits: per step, the logits [V] that chose the token.
        selected: per step, {pruning layer: sorted positions of all tokens in the step's set after it, newest included}.
        revived: per step, {pruning layer: sorted positions that left the Aux Cache there and entered the next layer}.
        importance: per step, {pruning layer: {position: mean attention probability of the newest token on it}}, for
            every token that entered the pruning layer in this step.
        computed: [steps, L] int, distinct prompt tokens computed so far in each layer.
        compute_counts: {(layer, position): how many times the token was computed in the layer}; nothing above 1.
        aux: {pruning layer: positions whose hidden state is held at that boundary at the end}.
        margin: the smallest difference in importance between a kept and a dropped candidate, over all selections, exact
            ties left out (infinite where no selection had a choice): a selection is decisive if this is well above the
            rounding errors of whatever is compared.
    """

    token_ids: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    selected: list[dict[int, list[int]]] = field(default_factory=list)
    revived: list[dict[int, list[int]]] = field(default_factory=list)
    importance: list[dict[int, dict[int, float]]] = field(default_factory=list)
    computed: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    compute_counts: dict[tuple[int, int], int] = field(default_factory=dict)
    aux: dict[int, set[int]] = field(default_factory=dict)
    margin: float = float("inf")


def lazy_reference(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    schedule: Mapping[int, float],
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    prune_generated: bool = False,
    forced: Sequence[int] = (),
) -> ReferenceOutput:
    """Greedy generation with LazyLLM's pruning (sections 3.2 to 3.4 of the paper; `shared/paper/lazyllm.md`, 1 to 6).

    Args:
        model: a Hugging Face model that :class:`HandModel` knows; only its weights are used.
        input_ids: the N prompt tokens, N >= 1.
        schedule: {pruning layer, from 1: keep ratio in (0, 1]}.
        max_new_tokens: at most so many tokens are generated, >= 1.
        eos_token_ids: generation stops after one of these.
        prune_generated: in decoding, the generated tokens but the newest are candidates too, and count.
        forced: the first so many tokens are these, whatever the logits say (teacher forcing).

    Returns:
        Tokens, logits, selections and counts; see :class:`ReferenceOutput`.
    """
    hand = HandModel(model)
    if not input_ids or max_new_tokens < 1:
        raise ValueError("at least one prompt token and one new token, please")
    for boundary, ratio in schedule.items():
        if not 1 <= boundary <= hand.num_layers or not 0 < ratio <= 1:
            raise ValueError(f"pruning layer {boundary} with keep ratio {ratio} for {hand.num_layers} layers")

    num_prompt = len(input_ids)
    layers = range(1, hand.num_layers + 1)
    kv: dict[int, dict[int, tuple[np.ndarray, np.ndarray]]] = {layer: {} for layer in layers}
    aux: dict[int, dict[int, np.ndarray]] = {boundary: {} for boundary in sorted(schedule)}
    counts: Counter[tuple[int, int]] = Counter()
    computed: list[list[int]] = []
    out = ReferenceOutput()

    text = list(input_ids)
    new_positions = list(range(num_prompt))  # step 0 is the prefill: all prompt tokens are new
    while True:
        newest = new_positions[-1]
        prefill = newest < num_prompt
        # `active`: the tokens of this step's set. `hidden`: those of them that this step computes in the current group;
        # the others have their key and value there already.
        active = set(range(newest + 1))
        hidden = {p: hand.embed(text[p]) for p in new_positions}
        selected_here: dict[int, list[int]] = {}
        revived_here: dict[int, list[int]] = {}
        importance_here: dict[int, dict[int, float]] = {}

        for layer in layers:
            for p in hidden:
                kv[layer][p] = hand.key_value(layer, hidden[p], p)
                counts[layer, p] += 1
            importance: dict[int, float] = {}
            for p in sorted(hidden):
                attended = sorted(other for other in active if other <= p)
                hidden[p], probabilities = hand.layer(layer, hidden[p], p, [kv[layer][other] for other in attended])
                if p == newest:  # equation 1: the mean over the heads
                    importance = dict(zip(attended, probabilities.mean(axis=0).tolist(), strict=True))

            if layer not in schedule:
                continue

            # Selection.
            if prefill:
                candidates = active - {newest}
                kept_count = keep_count(schedule[layer], len(candidates) + 1) - 1  # the newest token counts among them
            else:
                candidates = {p for p in active if p < num_prompt or (prune_generated and p != newest)}
                kept_count = keep_count(schedule[layer], len(candidates))
            ranking = sorted(candidates, key=lambda p: (-importance[p], p))
            kept, dropped = ranking[:kept_count], ranking[kept_count:]
            if kept and dropped:
                gap = importance[kept[-1]] - importance[dropped[0]]
                out.margin = min(out.margin, gap) if gap > 0 else out.margin
            selected = (active - candidates) | set(kept)
            selected_here[layer] = sorted(selected)
            importance_here[layer] = importance
            revived_here[layer] = []
            if layer == hand.num_layers:
                continue  # there is no next layer: the selection changes nothing

            # Who was computed up to here and does not go on waits in the Aux Cache; who goes on and was not computed
            # beyond comes from this step's hidden states, or else from the Aux Cache (it is revived).
            for p in set(hidden) - selected:
                assert p not in aux[layer]
                assert p not in kv[layer + 1]
                aux[layer][p] = hidden.pop(p)
            for p in selected - set(hidden):
                if p not in kv[layer + 1]:
                    hidden[p] = aux[layer].pop(p)
                    revived_here[layer].append(p)
            revived_here[layer].sort()
            active = selected

        out.selected.append(selected_here)
        out.revived.append(revived_here)
        out.importance.append(importance_here)
        out.logits.append(hand.logits(hidden[newest]))
        computed.append([sum(p < num_prompt for p in kv[layer]) for layer in layers])
        step = len(out.token_ids)
        token = forced[step] if step < len(forced) else int(np.argmax(out.logits[-1]))  # the lowest id wins ties
        out.token_ids.append(token)
        if token in eos_token_ids or len(out.token_ids) == max_new_tokens:
            break
        new_positions = [len(text)]
        text.append(token)

    assert max(counts.values()) == 1, "a token was computed twice in a layer"
    out.computed = np.array(computed, dtype=np.int64)
    out.compute_counts = dict(counts)
    out.aux = {boundary: set(held) for boundary, held in aux.items()}
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Small random models that are float64 all the way through
# ---------------------------------------------------------------------------------------------------------------------


class Float64RMSNorm(nn.Module):
    """transformers' RMSNorm without its rounding to float32 in between (see :func:`random_model`)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


class Float64RotaryEmbedding(nn.Module):
    """transformers' default rotary embedding with its angles in float64: cos and sin, each [b, n, d]."""

    inv_freq: torch.Tensor  # [d/2]

    def __init__(self, theta: float, head_dim: int) -> None:
        super().__init__()
        inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    @torch.no_grad()
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].to(torch.float64) * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def random_model(
    architecture: str,
    seed: int,
    num_layers: int = 4,
    attn_implementation: str = "sdpa",
    float64_throughout: bool = True,
    **overrides: Any,
) -> PreTrainedModel:
    """A small random float64 model whose attention is far from uniform, so that selections are decisive.

    Every parameter is random, norm weights and biases included. transformers rounds to float32 inside RMSNorm and the
    rotary embedding even in a float64 model, so that its logits are good to 1e-6 only; unless told otherwise these two
    modules are therefore replaced by float64 ones (the layers stay transformers'). Eager attention rounds its softmax
    as well: use SDPA, or :func:`casts_in_float64`, where 1e-9 is asked for.

    Args:
        architecture: "llama", "mistral", "qwen2" or "qwen3".
        seed: of all weights; the global random state is left alone.
        num_layers: decoder layers.
        attn_implementation: "sdpa" or "eager".
        float64_throughout: replace the two modules; False leaves transformers' model as it is.
        overrides: further fields of the configuration, over the defaults here.

    Returns:
        The model, in eval mode, without gradients.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not one of {ARCHITECTURES}")
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if architecture in ("mistral", "qwen2", "qwen3"):
        fields["sliding_window"] = None
    if architecture == "qwen3":
        fields["head_dim"] = 16  # not hidden_size / num_attention_heads, as in the released checkpoints
    config = AutoConfig.for_model(architecture, **(fields | overrides))

    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=torch.float64
        ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            parameter.copy_(1.0 + 0.3 * noise)
        elif "embed_tokens" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(0.25 * noise)

    if float64_throughout:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__.endswith("RMSNorm") and not isinstance(child, Float64RMSNorm):
                    setattr(parent, name, Float64RMSNorm(child.weight, child.variance_epsilon))
        head_dim = model.model.layers[0].self_attn.head_dim
        model.model.rotary_emb = Float64RotaryEmbedding(config.rope_parameters["rope_theta"], head_dim)
    return model


@contextlib.contextmanager
def casts_in_float64() -> Iterator[None]:
    """Within it, Python code that asks for float32 gets float64: transformers' eager softmax, RMSNorm and RoPE too.

    By replacing the names ``torch.float32``, ``torch.float`` and ``Tensor.float``: for a few lines around a model's
    forward pass in a test, not for more.
    """
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
