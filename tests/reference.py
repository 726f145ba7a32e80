"""An obvious, slow, independent re-implementation of LazyLLM (arXiv 2407.14057, section 3), for the
tests only.

Nothing here is fast and nothing is shared with the `lazyllm` package: tokens live in dictionaries
(position -> hidden vector; per layer, position -> key and value), attention is computed for one
query token at a time, and the whole forward pass (norms, RoPE and its scalings, grouped-query
attention, sliding windows, softcaps, gated MLPs, the multipliers of some models) is written out in
float64 numpy from the model's weights and its config. `tests/test_reference.py` holds it to
transformers' own forward pass and to selections by hand.

Decided here, because the paper leaves it open:

1. An answer's last token is never run. That holds for an end token too.
2. The newest token always stays: the prompt's last one in the prefill, and the newest generated one
   in decoding.
3. A step selects `ceil(ratio * c)` of the c prompt tokens that entered the layer in this step. In
   the prefill the newest token is among them.
4. Generated tokens stay and do not count. With `prune_generated` all but the newest one are
   candidates and count.
5. `revive=False`: decoding uses what the prefill selected, and nothing is selected again. Nothing
   waits in the Aux Cache.
6. RoPE that depends on the length: a token keeps the length of the text in the step in which it
   entered layer 1.
7. Bytes are of what is held, not of what is reserved: keys and values in the model's dtype, of each
   layer and head; hidden states at boundaries. A token that has not run holds nothing.

Notation: `N` prompt tokens, `L` layers, `H` query heads, `G` key/value heads, `d` head width, `D`
model width, `V` vocabulary. Layers and pruning layers are counted from 1, positions from 0.
Boundary l comes after layer l.
The text: all token ids so far, prompt and answer. A step: one pass that gives one set of logits.
Step 0, the prefill, takes in the prompt; later steps decode.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
Pair = tuple[np.ndarray, np.ndarray]  # key and value of a token, [G, d], or of one KV head, [d]


# --- The model, by hand ---


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


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    """GELU, approximated by tanh (Hendrycks and Gimpel 2016), elementwise."""
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    """Softcap of logits (Gemma 2, arXiv 2408.00118): cap * tanh(x / cap)."""
    return x if cap is None else cap * np.tanh(x / cap)


def rope_frequencies(
    rope: Mapping[str, Any], width: int, max_positions: int, reach: int
) -> tuple[np.ndarray, float]:
    """Radians per position of each pair of dimensions, [width / 2], and the factor on cos and sin.

    rope: the config's RoPE parameters, for one kind of layer.
    width: dimensions that are rotated.
    max_positions: the config's max_position_embeddings.
    reach: length of the text when the token was computed (dynamic NTK and LongRoPE depend on it).
    """
    theta, pairs = rope["rope_theta"], np.arange(width // 2)
    plain = theta ** (-2.0 * pairs / width)
    factor: Any = rope.get("factor")
    match rope["rope_type"]:
        case "default":
            return plain, 1.0
        case "linear":  # Chen et al. 2023, arXiv 2306.15595
            return plain / factor, 1.0
        case (
            "dynamic"
        ):  # NTK-aware: the base grows with the text once it is longer than the model was made for
            grown = max(reach, max_positions) / max_positions
            theta = theta * (factor * grown - (factor - 1)) ** (width / (width - 2))
            return theta ** (-2.0 * pairs / width), 1.0
        case (
            "yarn"
        ):  # Peng et al. 2023, arXiv 2309.00071, with the rounded bounds of its authors' code
            original = rope["original_max_position_embeddings"]

            def pair_that_turns(times: float) -> float:
                return width * np.log(original / (times * 2 * np.pi)) / (2 * np.log(theta))

            low = max(np.floor(pair_that_turns(32)), 0)
            high = min(np.ceil(pair_that_turns(1)), width - 1)
            ramp = np.clip((pairs - low) / (high - low), 0, 1)  # 0: as it was, 1: stretched
            return plain * (1 - ramp) + plain / factor * ramp, 0.1 * np.log(factor) + 1
        case "llama3":  # as published with Llama 3.1
            original, slow, fast = (
                rope[name]
                for name in (
                    "original_max_position_embeddings",
                    "low_freq_factor",
                    "high_freq_factor",
                )
            )
            turns = original * plain / (2 * np.pi)  # within the original length
            smooth = np.clip((turns - slow) / (fast - slow), 0, 1)
            return plain * smooth + plain / factor * (1 - smooth), 1.0
        case "longrope":  # Ding et al. 2024, arXiv 2402.13753, as published with Phi-3
            original = rope["original_max_position_embeddings"]
            stretch = np.array(rope["long_factor"] if reach > original else rope["short_factor"])
            return plain / stretch, np.sqrt(1 + np.log(max_positions / original) / np.log(original))
        case other:
            raise ValueError(f"the reference knows no RoPE of type {other!r}")


class HandModel:
    """The weights of a model in float64 numpy, and one token's way through a layer.

    model: a Hugging Face causal language model of a type in `VARIANTS`. Its weights are copied; the
        model is neither run nor changed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self.kind: str = config.model_type
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        self.activation = {"silu": _silu, "gelu_pytorch_tanh": _gelu_tanh}[activation]
        self.is_gemma = self.kind in ("gemma2", "gemma3_text")

        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.eps: float = config.rms_norm_eps
        self.max_positions: int = config.max_position_embeddings
        self.weights = {
            name: tensor.detach().cpu().to(torch.float64).numpy().copy()
            for name, tensor in model.state_dict().items()
        }
        self.head_dim: int = (
            self.weights["model.layers.0.self_attn.o_proj.weight"].shape[1] // self.num_heads
        )

        # a layer's window: a token sees itself and `window` - 1 positions before it
        window = config.sliding_window if hasattr(config, "sliding_window") else None
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * self.num_layers
        self.windows = [window if kind == "sliding_attention" else None for kind in kinds]

        # RoPE by layer; None if a layer has no RoPE (SmolLM3 marks layers with RoPE by 1)
        ropes = config.rope_parameters
        self.ropes = [ropes.get(kind, ropes) for kind in kinds]
        if self.kind == "smollm3":
            self.ropes = [
                rope if has else None
                for rope, has in zip(self.ropes, config.no_rope_layers, strict=True)
            ]

        self.attention_scale = 1 / np.sqrt(self.head_dim)
        self.attention_cap = self.logits_cap = None
        self.embedding_factor = self.residual_factor = self.logits_divisor = 1.0
        if self.is_gemma:
            self.attention_scale = config.query_pre_attn_scalar**-0.5
            self.embedding_factor = config.hidden_size**0.5
            self.logits_cap = config.final_logit_softcapping
            self.attention_cap = config.attn_logit_softcapping if self.kind == "gemma2" else None
        elif self.kind == "granite":
            self.attention_scale = config.attention_multiplier
            self.embedding_factor = config.embedding_multiplier
            self.residual_factor = config.residual_multiplier
            self.logits_divisor = config.logits_scaling

    def sees(self, layer: int, position: int, other: int) -> bool:
        """Whether a token attends to another one in this layer, if both are stored."""
        window = self.windows[layer - 1]
        return other <= position and (window is None or position - other < window)

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        """W x + b, or W x if the layer has no b."""
        y = self.weights[f"{name}.weight"] @ x
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """RMSNorm; Gemma's weights are offsets from 1. If the model has no such norm, x is
        returned unchanged.
        """
        if f"{name}.weight" not in self.weights:
            return x
        return _rms_norm(
            x, self.weights[f"{name}.weight"] + (1.0 if self.is_gemma else 0.0), self.eps
        )

    def _head_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """Norm of queries or keys (x: [heads, d]): OLMo 2's over all heads together, of others
        over each head.
        """
        if self.kind == "olmo2":
            return self._norm(name, x.reshape(-1)).reshape(x.shape)
        return np.stack([self._norm(name, head) for head in x])

    def _rope(self, x: np.ndarray, layer: int, position: int, reach: int) -> np.ndarray:
        """Rotary position embedding (Su et al. 2021), rotate-half convention. x: [heads, d]."""
        rope = self.ropes[layer - 1]
        if rope is None:
            return x
        width = int(self.head_dim * rope.get("partial_rotary_factor", 1.0))
        frequencies, factor = rope_frequencies(rope, width, self.max_positions, reach)
        angle = position * frequencies  # [width / 2]
        cos, sin = factor * np.cos(angle), factor * np.sin(angle)
        first, second, rest = x[:, : width // 2], x[:, width // 2 : width], x[:, width:]
        return np.concatenate(
            [first * cos - second * sin, second * cos + first * sin, rest], axis=1
        )

    def _query_key_value(
        self, layer: int, x: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[H, d], [G, d], [G, d], from one matrix (Phi-3) or three; before norms and RoPE."""
        attention = f"model.layers.{layer - 1}.self_attn"
        if f"{attention}.qkv_proj.weight" in self.weights:
            all_heads = self._linear(f"{attention}.qkv_proj", x).reshape(-1, self.head_dim)
            q, k, v = np.split(all_heads, [self.num_heads, self.num_heads + self.num_kv_heads])
            return q, k, v
        q, k, v = (
            self._linear(f"{attention}.{name}_proj", x).reshape(-1, self.head_dim) for name in "qkv"
        )
        return q, k, v

    def _mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        mlp = f"model.layers.{layer - 1}.mlp"
        if f"{mlp}.gate_up_proj.weight" in self.weights:
            gate, up = np.split(self._linear(f"{mlp}.gate_up_proj", x), 2)
        else:
            gate, up = self._linear(f"{mlp}.gate_proj", x), self._linear(f"{mlp}.up_proj", x)
        return self._linear(f"{mlp}.down_proj", self.activation(gate) * up)

    def embed(self, token_id: int) -> np.ndarray:
        """The hidden state [D] that enters layer 1."""
        return self.weights["model.embed_tokens.weight"][token_id] * self.embedding_factor

    def key_value(
        self, layer: int, hidden: np.ndarray, position: int, reach: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Key (after RoPE) and value [G, d] of a token's hidden [D] in one layer. reach: as in
        `rope_frequencies`.
        """
        x = self._norm(f"model.layers.{layer - 1}.input_layernorm", hidden)
        _, k, v = self._query_key_value(layer, x)
        k = self._head_norm(f"model.layers.{layer - 1}.self_attn.k_norm", k)
        return self._rope(k, layer, position, reach), v

    def query(self, layer: int, hidden: np.ndarray, position: int, reach: int) -> np.ndarray:
        """Query (after RoPE) of one token in one layer. Arguments as of `key_value`; returns [H,
        d].
        """
        q, _, _ = self._query_key_value(
            layer, self._norm(f"model.layers.{layer - 1}.input_layernorm", hidden)
        )
        q = self._head_norm(f"model.layers.{layer - 1}.self_attn.q_norm", q)
        return self._rope(q, layer, position, reach)

    def kv_head(self, head: int) -> int:
        """The key/value head that a query head reads (grouped-query attention). Both from 0."""
        return head // (self.num_heads // self.num_kv_heads)

    def attention_logits(self, query: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Attention logits [t] of one query head [d] to keys [t, d], with the model's scale and
        softcap.
        """
        return _capped(keys @ query * self.attention_scale, self.attention_cap)

    def layer(
        self,
        layer: int,
        hidden: np.ndarray,
        position: int,
        reach: int,
        attended: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One token through one layer, from 1: hidden state before it and after it, [D].

        attended: key and value, each [G, d], of every token it attends to (itself among them), `t`
        of them. reach: as in `rope_frequencies`. Also returns the attention probabilities, [H, t],
        and their logits, [H, t].
        """
        by_head = [[(k[g], v[g]) for k, v in attended] for g in range(self.num_kv_heads)]
        after, probabilities, logits = self.attend_by_head(layer, hidden, position, reach, by_head)
        return after, np.stack(probabilities), np.stack(logits)

    def attend_by_head(
        self,
        layer: int,
        hidden: np.ndarray,
        position: int,
        reach: int,
        attended: Sequence[Sequence[Pair]],
    ) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
        """`layer` with other tokens for each key/value head; `attended[g]`: pairs of [d] of head
        g.
        """
        prefix = f"model.layers.{layer - 1}"
        q = self.query(layer, hidden, position, reach)
        # [t, d] by KV head
        stored = [[np.stack(tensors) for tensors in zip(*here, strict=True)] for here in attended]
        probabilities, outputs, logits = [], [], []
        for head in range(self.num_heads):
            keys, values = stored[self.kv_head(head)]
            logits.append(self.attention_logits(q[head], keys))
            probabilities.append(_softmax(logits[-1]))
            outputs.append(probabilities[-1] @ values)
        attention = self._linear(f"{prefix}.self_attn.o_proj", np.concatenate(outputs))
        if (
            self.is_gemma or self.kind == "olmo2"
        ):  # the norm of this name follows attention, instead of preceding the MLP
            attention, before_mlp = (
                self._norm(f"{prefix}.post_attention_layernorm", attention),
                "pre_feedforward",
            )
        else:
            before_mlp = "post_attention"
        hidden = hidden + self.residual_factor * attention
        mlp = self._mlp(layer, self._norm(f"{prefix}.{before_mlp}_layernorm", hidden))
        mlp = self._norm(f"{prefix}.post_feedforward_layernorm", mlp)
        return hidden + self.residual_factor * mlp, probabilities, logits

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Final norm and language-model head: hidden state after the last layer [D] -> [V]."""
        logits = self._linear("lm_head", self._norm("model.norm", hidden)) / self.logits_divisor
        return _capped(logits, self.logits_cap)


def forward_reference(model: PreTrainedModel, input_ids: Sequence[int]) -> np.ndarray:
    """Logits [N, V] of all positions, without any pruning: what `model(input_ids).logits[0]`
    should be.
    """
    hand = HandModel(model)
    hidden = {position: hand.embed(token) for position, token in enumerate(input_ids)}
    reach = len(input_ids)
    for layer in range(1, hand.num_layers + 1):
        kv = {p: hand.key_value(layer, hidden[p], p, reach) for p in hidden}
        seen = {p: [kv[other] for other in kv if hand.sees(layer, p, other)] for p in hidden}
        hidden = {p: hand.layer(layer, hidden[p], p, reach, seen[p])[0] for p in hidden}
    return np.stack([hand.logits(hidden[p]) for p in sorted(hidden)])


# --- The method ---


def keep_count(ratio: float, n: int, rounded: Callable[[Fraction], int] = ceil) -> int:
    """ceil(ratio * n), with the ratio taken as the decimal number it was written as (0.55 of 20
    is 11, not 12).
    """
    return rounded(Fraction(str(ratio)) * n)


@dataclass
class ReferenceOutput:
    """One answer. Lists have an entry for each step of this answer.

    token_ids: the generated tokens, the end token (if reached) included.
    logits: the logits [V] that chose the token.
    selected: {boundary: sorted positions of the step's set after it, generated tokens and the
        newest included}.
    revived: {boundary: sorted positions that left the Aux Cache there and entered the next layer}.
    importance: {boundary: {position: mean attention probability of the newest token}} of the step's
        set before it.
    computed: [steps, L] int, distinct prompt tokens computed so far in each layer.
    compute_counts: {(layer, position): how many times the token was computed in the layer}; nothing
        above 1.
    aux: {boundary: positions whose hidden state is held there at the end of the answer}.
    kv_bytes, aux_bytes: held at the end of the answer.
    margin: the smallest difference in importance between a kept and a dropped candidate, over all
        selections, exact ties left out (infinite if no selection had a choice): a selection is
        decisive if this is well above the rounding errors of the compared results.
    """

    token_ids: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    selected: list[dict[int, list[int]]] = field(default_factory=list)
    revived: list[dict[int, list[int]]] = field(default_factory=list)
    importance: list[dict[int, dict[int, float]]] = field(default_factory=list)
    computed: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    compute_counts: dict[tuple[int, int], int] = field(default_factory=dict)
    aux: dict[int, set[int]] = field(default_factory=dict)
    kv_bytes: int = 0
    aux_bytes: int = 0
    margin: float = float("inf")


def kv_bytes_of(hand: HandModel, model: PreTrainedModel, num_pairs: int) -> int:
    """Bytes of key and value of `num_pairs` tokens, each in one KV head of one layer."""
    return num_pairs * 2 * hand.head_dim * model.dtype.itemsize


class LazyReference:
    """LazyLLM (sections 3.2 to 3.4 of the paper). With an empty schedule: the baseline.

    There is no Aux Cache here: every layer remembers all hidden states of its output. A selected
    token that was not in the next layer yet enters it from there. The size of the Aux Cache follows
    by counting.

    model: a Hugging Face model that `HandModel` knows; only its weights are used.
    prompt: the prompt's tokens.
    schedule: {pruning layer, from 1: keep ratio in (0, 1]}.
    prune_generated: in decoding, all generated tokens except the newest are candidates too, and
        count.
    revive: False for the ablation without section 3.3: decoding uses the prefill's selections.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Sequence[int],
        schedule: Mapping[int, float],
        prune_generated: bool = False,
        revive: bool = True,
    ) -> None:
        self.model, self.hand, self.schedule = model, HandModel(model), dict(schedule)
        self.prune_generated, self.revive = prune_generated, revive
        self.layers = range(1, self.hand.num_layers + 1)

        self.text = [*prompt]
        self.prompt = set(range(len(prompt)))  # positions of prompt tokens
        self.num_run = 0  # number of the text's first tokens that have been in a step
        self.reach: dict[int, int] = {}
        self.kv: dict[int, dict[int, Pair]] = {layer: {} for layer in self.layers}
        # 0: embeddings
        self.after: dict[int, dict[int, np.ndarray]] = {layer: {} for layer in (0, *self.layers)}
        # of (layer, position): how often it was computed
        self.counts: Counter[tuple[int, int]] = Counter()
        self.first_selected: dict[int, set[int]] = {}  # by the prefill

    def answer(
        self, max_new_tokens: int, eos_token_ids: Collection[int] = (), forced: Sequence[int] = ()
    ) -> ReferenceOutput:
        """Generate greedily.

        eos_token_ids: generation stops after one of these. forced: the first generated tokens,
            whatever the logits are.
        """
        out, computed = ReferenceOutput(), []
        while len(out.token_ids) < max_new_tokens and not set(out.token_ids) & set(eos_token_ids):
            self._step(out)
            computed.append([len(self.prompt & set(self.after[layer])) for layer in self.layers])
            step = len(out.token_ids)
            best = int(np.argmax(out.logits[-1]))  # the lowest id wins ties
            out.token_ids.append(forced[step] if step < len(forced) else best)
            self.text.append(out.token_ids[-1])
        assert max(self.counts.values()) == 1, "a token was computed twice in a layer"
        out.computed, out.compute_counts = np.array(computed, dtype=np.int64), dict(self.counts)
        out.aux = {boundary: self._waiting(boundary) for boundary in sorted(self.schedule)}
        held = sum(len(positions) for positions in out.aux.values())
        out.aux_bytes = held * self.model.config.hidden_size * self.model.dtype.itemsize
        num_pairs = self.hand.num_kv_heads * sum(len(stored) for stored in self.kv.values())
        out.kv_bytes = kv_bytes_of(self.hand, self.model, num_pairs)
        return out

    def _waiting(self, boundary: int) -> set[int]:
        """Computed up to the boundary and not beyond. Without revival, nothing waits."""
        if boundary == self.hand.num_layers or not self.revive:
            return set()
        return set(self.after[boundary]) - set(self.after[boundary + 1])

    def _step(self, out: ReferenceOutput) -> None:
        """All tokens of the text that have not been in a step, through the model."""
        rows = range(self.num_run, len(self.text))
        for p in rows:
            self.after[0][p] = self.hand.embed(self.text[p])
            self.reach[p] = len(self.text)
        for by_boundary in (out.selected, out.revived, out.importance):
            by_boundary.append({})

        active = set(range(len(self.text)))  # the step's set
        for layer in self.layers:
            before = set(self.after[layer])
            importance = self._enter(layer, active)
            if layer in self.schedule:
                active = self._select(layer, active, importance, out)
                beyond = active if layer == self.hand.num_layers else set(self.after[layer + 1])
                out.importance[-1][layer] = importance
                out.selected[-1][layer] = sorted(active)
                out.revived[-1][layer] = sorted((active & before) - beyond)
        out.logits.append(self.hand.logits(self.after[self.hand.num_layers][rows[-1]]))
        self.num_run = len(self.text)

    def _enter(self, layer: int, active: set[int]) -> dict[int, float]:
        """Run the tokens of the set that the layer has not seen yet; attention of the last one,
        mean over heads.
        """
        new = [p for p in sorted(active) if p not in self.after[layer]]
        for p in new:
            self.kv[layer][p] = self.hand.key_value(
                layer, self.after[layer - 1][p], p, self.reach[p]
            )
        importance = dict.fromkeys(sorted(active), 0.0)  # 0 outside the layer's window
        for p in new:
            seen = [other for other in sorted(active) if self.hand.sees(layer, p, other)]
            pairs = [self.kv[layer][other] for other in seen]
            after, attention, _ = self.hand.layer(
                layer, self.after[layer - 1][p], p, self.reach[p], pairs
            )
            self.after[layer][p] = after
            self.counts[layer, p] += 1
            if p == max(active):
                importance |= dict(zip(seen, attention.mean(axis=0).tolist(), strict=True))
        return importance

    def _select(
        self, boundary: int, active: set[int], importance: dict[int, float], out: ReferenceOutput
    ) -> set[int]:
        """The tokens of the step's set that continue."""
        if not self.revive and boundary in self.first_selected:
            return {p for p in active if p in self.first_selected[boundary] or p not in self.prompt}
        newest = max(active)
        counted = set(active) if self.prune_generated else active & self.prompt
        if newest not in self.prompt:
            counted -= {newest}
        room = keep_count(self.schedule[boundary], len(counted)) - (newest in counted)
        ranking = sorted(counted - {newest}, key=lambda p: (-importance[p], p))
        kept, dropped = ranking[:room], ranking[room:]
        if kept and dropped and (gap := importance[kept[-1]] - importance[dropped[0]]) > 0:
            out.margin = min(out.margin, gap)
        selected = (active - set(dropped)) | {newest}
        self.first_selected.setdefault(boundary, selected)
        return selected


def lazy_reference(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    schedule: Mapping[int, float],
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    prune_generated: bool = False,
    forced: Sequence[int] = (),
    revive: bool = True,
) -> ReferenceOutput:
    """The answer of `LazyReference`, which describes the arguments."""
    reference = LazyReference(model, input_ids, schedule, prune_generated, revive)
    return reference.answer(max_new_tokens, eos_token_ids, forced)


# --- Small random models that are float64 all the way through ---


def _rope(kind: str = "default", rope_theta: float = 10000.0, **more: Any) -> dict[str, Any]:
    """A config's RoPE parameters."""
    return {"rope_type": kind, "rope_theta": rope_theta, **more}


# The config of a small model
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_parameters": _rope(), "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def random_model(
    architecture: str,
    seed: int,
    num_layers: int = 4,
    attn_implementation: str = "sdpa",
    float64_throughout: bool = True,
    **overrides: Any,
) -> PreTrainedModel:
    """A small random float64 model whose attention is far from uniform, so that selections are
    decisive.

    transformers rounds to float32 inside RMSNorm and the rotary embedding even in a float64 model,
    so that its logits are good to 1e-6 only; unless `float64_throughout` is False, these modules
    therefore run in `casts_in_float64`.
    Eager attention rounds its softmax as well: use SDPA, or `casts_in_float64`, for comparisons to
        1e-9.
    """
    fields = SMALL | {"hidden_size": 48, "head_dim": 12, "num_hidden_layers": num_layers}
    if architecture in ("mistral", "qwen2", "qwen3"):
        fields["sliding_window"] = None
    if architecture == "qwen3":
        fields["head_dim"] = (
            16  # not hidden_size / num_attention_heads, as in the released checkpoints
        )
    model = _random(architecture, fields | overrides, seed, attn_implementation, torch.float64)
    for module in model.modules() if float64_throughout else ():
        kind = type(module)
        if kind.__name__.endswith(("RMSNorm", "RotaryEmbedding")):
            module.__class__ = type(
                kind.__name__, (kind,), {"forward": casts_in_float64()(kind.forward)}
            )
    return model


def _random(
    model_type: str,
    fields: Mapping[str, Any],
    seed: int,
    attn_implementation: str,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Every parameter random, norm weights and biases included; the global random state is left
    alone.
    """
    # some configs change their RoPE's dict
    config = AutoConfig.for_model(model_type, **copy.deepcopy(dict(fields)))
    exact = casts_in_float64() if dtype == torch.float64 else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), exact:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=dtype
        ).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            parameter.copy_((0.0 if model_type in ("gemma2", "gemma3_text") else 1.0) + 0.3 * noise)
        elif "embed_tokens" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(0.25 * noise)
    return model


_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
WINDOW = 7

# One row per kind of decoder that the library supports: model type, and its differences to
# `random_model`. Lengths at which something changes (windows, RoPEs that depend on the length) are
# short enough for prompts of a few tokens.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, linear RoPE": ("llama", {"rope_parameters": _rope("linear", factor=3.0)}),
    "llama, dynamic NTK": (
        "llama",
        {"rope_parameters": _rope("dynamic", factor=2.0), "max_position_embeddings": 19},
    ),
    "llama, YaRN": (
        "llama",
        {"rope_parameters": _rope("yarn", 100.0, factor=4.0, original_max_position_embeddings=128)},
    ),
    "llama, Llama 3 RoPE": (
        "llama",
        {
            "rope_parameters": _rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        },
    ),
    "mistral, window": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"sliding_window": None}),
    "qwen2, window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 16, "sliding_window": None}),
    "phi3, partial RoPE": ("phi3", {"rope_parameters": _rope(partial_rotary_factor=0.5)}),
    "phi3, LongRoPE and window": (
        "phi3",
        {
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 16,
            "rope_parameters": _rope(
                "longrope",
                original_max_position_embeddings=16,
                short_factor=[1.0 + 0.1 * pair for pair in range(8)],
                long_factor=[1.0 + 1.5 * pair for pair in range(8)],
            ),
            "sliding_window": WINDOW,
        },
    ),
    "gemma2": (
        "gemma2",
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "layer_types": _ALTERNATING,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "full_attention": _rope("linear", 1e6, factor=8.0),
                "sliding_attention": _rope(rope_theta=1e3),
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.5,
            "pad_token_id": 0,  # a row of zeros, on which a scale does not show
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": False}),
}


def random_variant(
    name: str,
    seed: int,
    attn_implementation: str = "sdpa",
    dtype: torch.dtype = torch.float64,
    **overrides: Any,
) -> PreTrainedModel:
    """A small random model of 4 layers for one of `VARIANTS`, transformers' own modules throughout.

    In float64, to be run within `casts_in_float64`, in which its constants are made too.
    """
    model_type, changes = VARIANTS[name]
    return _random(model_type, SMALL | changes | overrides, seed, attn_implementation, dtype)


def attention_of(variant: str) -> str:
    """SDPA, which keeps float64, if transformers allows it: not with a softcap."""
    return "eager" if variant == "gemma2" else "sdpa"


@contextlib.contextmanager
def casts_in_float64() -> Iterator[None]:
    """Within it, Python code that asks for float32 gets float64: transformers' eager softmax,
    RMSNorm and RoPE too.

    By replacing the names `torch.float32`, `torch.float` and `Tensor.float`, and the default dtype:
    for a few lines around a model's forward pass in a test, not for more.
    """
    saved, default = (torch.float32, torch.float, torch.Tensor.float), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(default)
