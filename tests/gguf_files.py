"""GGUF files of small random models, by the package's own writer, with the names of tensors of
its own table.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

WORDS = ("<unk>", "<s>", "</s>", "<|turn|>")
END, TURN = 2, 3  # the tokens that end a text and a turn
TEMPLATE = "{% for message in messages %}{{ message.content }}<|turn|>{% endfor %}"
_SIZES = dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300, max_position_embeddings=512, bos_token_id=1, eos_token_id=END,
)  # fmt: skip


def model_of(kind: str, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A random model: llama (tied or not), qwen2 (with biases), gemma3 (sliding windows, norms
    that add one).
    """
    torch.manual_seed(seed)
    match kind:
        case "llama":
            model = LlamaForCausalLM(
                LlamaConfig(**(_SIZES | {"tie_word_embeddings": True} | settings))
            )
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**(_SIZES | settings)))
        case _:
            changes = dict(
                head_dim=16, num_hidden_layers=7, sliding_window=32, query_pre_attn_scalar=256
            )
            model = Gemma3ForCausalLM(Gemma3TextConfig(**(_SIZES | changes | settings)))
    with torch.no_grad():
        for name, part in model.named_parameters():
            if part.dim() == 1:  # random models have zeros or ones here, which hide mistakes
                part.normal_(0.0 if "bias" in name or kind == "gemma3" else 1.0, 0.1)
    return model.eval()


def write_gguf(
    file: Path, model: Any, quantisation: str = "F32", *, extra: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None, leave_out: str | None = None,
    architecture: str | None = None,
) -> Path:  # fmt: skip
    """Write a model as llama.cpp's converter does: its names, Llama's permuted heads, Gemma's
    norms plus one.
    """
    config, kind = (
        model.config,
        {"gemma3_text": "gemma3"}.get(model.config.model_type, model.config.model_type),
    )
    writer = gguf.GGUFWriter(file, architecture or kind)
    writer.add_name("small")
    writer.add_file_type(
        gguf.LlamaFileType["ALL_F32" if quantisation == "F32" else f"MOSTLY_{quantisation}"]
    )
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    rope: Any = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if kind == "llama":
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    if kind == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    _add_tokenizer(writer, config.vocab_size, "llama" if kind == "gemma3" else "gpt2")
    for key, value in (extra or {}).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, part in model.named_parameters():
        stem, _, suffix = name.rpartition(".")
        values, tensor_name = part.detach().float().numpy(), f"{table.get_name(stem)}.{suffix}"
        if kind == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = (
                values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            )
        if kind == "gemma3" and "norm" in name:
            values = values + 1
        if tensor_name == leave_out:
            continue
        tensor_kind = Kind[quantisation] if part.dim() > 1 else Kind.F32
        data = values if tensor_kind == Kind.F32 else gguf.quantize(values, tensor_kind)
        writer.add_tensor(tensor_name, data, raw_dtype=tensor_kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, size: int, kind: str) -> None:
    """The special tokens, all bytes, and "th", as byte-level BPE ("gpt2") or as sentencepiece's
    ("llama").
    """
    letters = list(bytes_to_unicode().values())
    if kind == "llama":
        letters = [f"<0x{number:02X}>" for number in range(256)]
    tokens = [*WORDS, *letters, *(["t", "h", "▁"] if kind == "llama" else []), "th"]
    tokens += [f"<unused{number}>" for number in range(size - len(tokens))]
    kinds = [gguf.TokenType.CONTROL] * len(WORDS) + [gguf.TokenType.NORMAL] * (size - len(WORDS))
    if kind == "llama":
        kinds[len(WORDS) : len(WORDS) + 256] = [gguf.TokenType.BYTE] * 256
        writer.add_token_scores([-float(number) for number in range(size)])
    else:
        writer.add_tokenizer_pre("default")
        writer.add_token_merges(["t h"])
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(TURN)
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)
