"""One row per method, for the tests of all methods. A new method adds its row here.

`test_methods.py` and `test_no_host.py` run all rows; `architecture_matrix.py` the listed ones on
every architecture.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from lazyllm.check.invariants import keeping_everything
from lazyllm.engine.depth import Depth
from lazyllm.methods import (
    ASL,
    CLAA,
    Baseline,
    FastKV,
    GemFilter,
    Lazy,
    Method,
    PromptCompression,
    PromptDistill,
    Prune,
    PyramidInfer,
    RandomDrop,
    Select,
    SpecPrefill,
    StaticPruning,
    TriangleMix,
    UniPrefill,
)
from tests import field_oracles
from tests.helpers import example_of
from tests.reference import ReferenceOutput, forward_reference, keep_count, lazy_reference

Reference = Callable[[PreTrainedModel, Sequence[int], int], ReferenceOutput]


@dataclass(frozen=True)
class Row:
    """A method on a model of 4 layers.

    pruning: with parameters that prune. reference: their result for (model, prompt, steps), by
    `tests/reference.py`; `selected` may end early. asks: number of boundaries that may ask the
    device for the tokens to revive. scores: whether a model runs before the prefill.
    """

    pruning: Method
    reference: Reference | None = None
    asks: int = 0
    scores: bool = False


def _lazy(schedule: dict[int, float], asks: int, **settings: bool) -> Row:
    def reference(model: PreTrainedModel, prompt: Sequence[int], steps: int) -> ReferenceOutput:
        return lazy_reference(model, prompt, schedule, steps, **settings)

    return Row(Lazy(schedule, **settings), reference, asks)


def _dropped(model: PreTrainedModel, prompt: Sequence[int], steps: int) -> ReferenceOutput:
    n = len(prompt)  # the random choice is this project's own; the kept tokens are a prompt
    digest = hashlib.sha256(struct.pack(f"<{n}q", *prompt)).digest()
    draw = np.random.default_rng([3, int.from_bytes(digest[:8], "little")])
    others = draw.choice(n - 1, keep_count(0.5, n) - 1, replace=False)
    return _on_the_rest(model, prompt, [*others.tolist(), n - 1], steps)


def _compressed(model: PreTrainedModel, prompt: Sequence[int], steps: int) -> ReferenceOutput:
    """-log p of each token after those before it; the first one gets that of an even guess."""
    logits = forward_reference(model, prompt[:-2])
    log_sums = np.log(np.exp(logits).sum(axis=-1))
    later = [log_sums[p] - logits[p, token] for p, token in enumerate(prompt[1:-1])]
    info = [np.log(logits.shape[-1]), *later]
    ranking = sorted(range(len(info)), key=lambda p: (-info[p], p))
    return _on_the_rest(
        model, prompt, [*ranking[: keep_count(0.5, len(info))], len(prompt) - 1], steps
    )


def _on_the_rest(
    model: PreTrainedModel, prompt: Sequence[int], kept: list[int], steps: int
) -> ReferenceOutput:
    out = lazy_reference(model, [prompt[position] for position in sorted(kept)], {}, steps)
    out.selected = [{0: sorted(kept)}]
    return out


@dataclass(frozen=True)
class Remembering(Prune):
    """Prunes twice, and decoding still finds what was pruned in the layers that computed it."""

    keep: float = 0.5
    label, target_parameter = "remembering", "keep"
    forget = False

    def kept(self, depth: Depth, n: int) -> dict[int, int]:
        first = keep_count(self.keep, n)
        return {1: first, 3: keep_count(self.keep, first)}


def _remembered(model: PreTrainedModel, prompt: Sequence[int], steps: int) -> ReferenceOutput:
    out = lazy_reference(model, prompt, {1: 0.5, 3: 0.5}, steps, revive=False)
    out.selected = out.selected[:1]
    return out


def _run_select(model: PreTrainedModel, prompt: Sequence[int], steps: int) -> ReferenceOutput:
    reference = lazy_reference(model, prompt, {3: 0.5}, 1)
    out = field_oracles.on_the_rest(model, prompt, reference.selected[0][3], steps, renumber=False)
    return ReferenceOutput(out.token_ids, out.logits, [out.selected], margin=reference.margin)


def _own_draft(
    model: PreTrainedModel, prompt: Sequence[int], **settings: Any
) -> field_oracles.FieldOutput:
    return field_oracles.specprefill(model, model, prompt, **settings)


def _by_field(
    kind: Callable[..., Method],
    oracle: Callable[..., field_oracles.FieldOutput],
    scores: bool = False,
    **settings: Any,
) -> Row:
    """A method of the field, held by its oracle in `tests/field_oracles.py` with the same
    settings.
    """

    def reference(model: PreTrainedModel, prompt: Sequence[int], steps: int) -> ReferenceOutput:
        out = oracle(model, prompt, **settings, steps=steps)
        return ReferenceOutput(out.token_ids, out.logits, [out.selected], margin=out.margin)

    return Row(kind(**settings), reference, scores=scores)


_CLAA: dict[str, Any] = {"layer": 3, "keep": 0.5, "layers": 2, "window": 3}
# always cut after layer 2
_ASL: dict[str, Any] = {"first": 1, "threshold": 2.0, "keep": 6, "window": 4, "layers": 2}

# On every architecture
LISTED = {
    "asl": _by_field(ASL, field_oracles.asl, **_ASL),
    "baseline": Row(Baseline(), _lazy({}, 0).reference),
    "claa": _by_field(CLAA, field_oracles.claa, **_CLAA),
    "fastkv": _by_field(FastKV, field_oracles.fastkv, layer=2, keep=0.5, retain=0.3, window=3),
    "gemfilter": _by_field(GemFilter, field_oracles.gemfilter, True, layer=2, keep=0.5),
    "lazy": _lazy({1: 0.6, 2: 0.7, 3: 0.5}, asks=3),
    "lazy, prune_generated": _lazy({1: 0.6, 2: 0.7}, asks=2, prune_generated=True),
    "lazy, without revival": _lazy({1: 0.6, 3: 0.5}, asks=0, revive=False),
    "prompt_compression": Row(PromptCompression(0.5, "token"), _compressed, scores=True),
    "promptdistill": _by_field(
        PromptDistill, field_oracles.promptdistill, layers=[1, 3], keep=[0.6, 7]
    ),
    "pyramidinfer": _by_field(PyramidInfer, field_oracles.pyramidinfer, recent=0.3, decay=0.5),
    "random_drop": Row(RandomDrop(0.5, seed=3), _dropped),
    "specprefill": _by_field(SpecPrefill, _own_draft, True, keep=0.5, lookahead=3, chunk=3, pool=3),
    "static_pruning": _by_field(StaticPruning, field_oracles.static_pruning, layer=2, keep=0.4),
    "trianglemix": _by_field(
        TriangleMix, field_oracles.trianglemix, dense=1, sinks=1, window=3, last=2
    ),
    "uniprefill": _by_field(
        UniPrefill,
        field_oracles.uniprefill,
        layers=[1, 3],
        p=0.6,
        window=3,
        block=2,
        first=1,
        last=2,
    ),
}
ROWS = LISTED | {
    # nothing is revived after the last layer
    "lazy, one token": _lazy({1: 0.01, 2: 0.01, 4: 0.01}, asks=2),
    "prompt_compression, one token": Row(PromptCompression(0.01, "token"), scores=True),
    "prompt_compression, windows": Row(PromptCompression(0.7, "token", window=8), scores=True),
    "asl, without SnapKV": Row(ASL(**_ASL, retain=1)),
    "claa, without SnapKV": Row(CLAA(**_CLAA, retain=1)),
    "fastkv, without SnapKV": Row(FastKV(2, 0.4, 1)),
    "fastkv, after the last layer": Row(FastKV(4, 0.5, window=2)),
    "promptdistill, remembering": Row(PromptDistill(keep=0.3, forget=False)),
    "gemfilter, sound": Row(GemFilter(4, 6, sound=True, window=3), scores=True),
    "specprefill, sound": Row(SpecPrefill(keep=0.3, chunk=3, sound=True), scores=True),
    "static_pruning, after the last layer": Row(StaticPruning(4, 0.4)),
    "a Prune": Row(Remembering(), _remembered),
    "a Select": Row(example_of(Select)(3), _run_select, scores=True),
}
PRUNING = {
    name: row.pruning
    for name, row in ROWS.items()
    if name != "baseline" and not name.startswith("a ")
}
KEEPING = {name: keeping_everything(row.pruning) for name, row in ROWS.items()}
