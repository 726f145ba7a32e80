"""Run the matrix of supported architectures and write it down: docs/architectures.md.

    python -m scripts.dev.support_matrix            # some minutes on one core

`tests/lazyllm/engine/architecture_matrix.py` holds the cells and their checks. The document is written only if all
cells pass.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from lazyllm.engine.checks import check_same_as_model
from lazyllm.errors import UserError
from tests.lazyllm.engine.architecture_matrix import COLUMNS, Cell, cells, check
from tests.lazyllm.methods.method_matrix import LISTED
from tests.reference import VARIANTS

OUT = Path(__file__).parents[2] / "docs" / "architectures.md"

_SMALL: dict[str, Any] = dict(
    vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
    pad_token_id=None,
)  # fmt: skip
# Refused models: model type, settings in addition to `_SMALL`, and a part of the message
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT-2": ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 97}, "is not built like a Llama"),
    "Mamba": ("mamba", {}, "is not built like a Llama"),
    "Jamba": ("jamba", {}, "is not built like a Llama"),
    "LFM2 (convolutions)": ("lfm2", {}, "is not built like a Llama"),
    "Qwen3-Next (linear attention)": ("qwen3_next", {"num_experts": 4}, "layers of type linear_attention"),
    "MiniMax (linear attention)": ("minimax", {}, "layers of type linear_attention"),
    "Granite 4 hybrid (Mamba)": ("granitemoehybrid", {}, "layers of type linear_attention"),
    "Llama 4 (chunked attention)": ("llama4_text", {}, "layers of type chunked_attention"),
    "Gemma 3n (states between layers)": (
        "gemma3n_text",
        {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 97},
        "changes the hidden states between its layers",
    ),
    "Gemma 4 (inputs by layer)": (
        "gemma4_text",
        {"vocab_size_per_layer_input": 97},
        "gives its layers per_layer_input",
    ),
    "GPT-OSS (attention sinks)": ("gpt_oss", {"num_local_experts": 4}, "attends with s_aux"),
    "DiffLlama (two attentions a layer)": ("diffllama", {}, "8 of 4 watched layers"),
}


def refusal_of(name: str) -> str:
    """The message that refuses a model of `REFUSED` at start-up; "" if it is not refused."""
    kind, own, _ = REFUSED[name]
    config = AutoConfig.for_model(kind, **(({} if kind == "gpt2" else _SMALL) | own))
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    try:
        check_same_as_model(model)
    except UserError as error:
        return str(error)
    return ""


def table(holds: Mapping[Cell, bool]) -> str:
    """The matrix as Markdown: a row for each architecture and method, a column for each dtype and attention."""
    short = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16", "flash_attention_2": "flash"}
    names = [f"{short[dtype]} {short.get(attention, attention)}" for dtype, attention in COLUMNS]
    lines = ["| architecture | method | " + " | ".join(names) + " |", "|" + "---|" * (2 + len(names))]
    for architecture in VARIANTS:
        for method in LISTED:
            marks = []
            for dtype, attention in COLUMNS:
                cell = Cell(architecture, method, dtype, attention)
                marks.append("n/a" if cell not in holds else "yes" if holds[cell] else "NO")
            lines.append(f"| {architecture} | {method} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def document(text: str, holds: Mapping[Cell, bool]) -> str:
    """docs/architectures.md with its three written parts made anew: versions, matrix, refusals."""
    versions = f"torch {torch.__version__.split('+')[0]} and transformers {transformers.__version__}"
    reasons = [f"| {name} | {reason} |" for name, (_, _, reason) in REFUSED.items()]
    written = (
        f"Written by `python -m scripts.dev.support_matrix` with {versions} on a CPU: {len(holds)} combinations, all"
    )
    parts = {
        "written": f"{written} of which hold.",
        "matrix": table(holds),
        "refused": "\n".join(["| architecture | reason |", "|---|---|", *reasons]),
    }
    for name, part in parts.items():
        before, found, rest = text.partition(f"<!-- {name} -->\n")
        text = before + found + part + "\n" + rest[rest.index("<!-- end -->") :]
    return text


def main() -> int:
    """Check every cell; write the document if all pass."""
    torch.set_num_threads(1)
    holds = {}
    for cell in cells():
        try:
            check(cell)
            holds[cell] = True
        except AssertionError as error:
            holds[cell] = False
            print(f"{cell}: {error}", file=sys.stderr)
    not_refused = [name for name, (_, _, reason) in REFUSED.items() if reason not in refusal_of(name)]
    if not all(holds.values()) or not_refused:
        print(f"not written: see above; not refused as expected: {not_refused}", file=sys.stderr)
        return 1
    OUT.write_text(document(OUT.read_text(encoding="utf-8"), holds), encoding="utf-8")
    print(f"{OUT.name}: {len(holds)} combinations")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
