"""Stand-ins for checkpoints of Llama 2 7B chat, Llama 3.1 8B Instruct and XGen 7B: the same files, tensors, settings.

Every tensor is in the same shard as in the published checkpoint (XGen's: as `save_pretrained` placed it). Only the
width is small, and the weights give one answer to every prompt.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig

from lazyllm.models.tokenizers import load_tokenizer

SMALL = dict(hidden_size=64, intermediate_size=64)

LLAMA2 = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", hidden_size=4096,
    intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
    max_position_embeddings=4096, rms_norm_eps=1e-5, rope_scaling=None, bos_token_id=1, eos_token_id=2,
    initializer_range=0.02, pretraining_tp=1, tie_word_embeddings=False, torch_dtype="float16",
    transformers_version="4.32.0.dev0", use_cache=True, vocab_size=32000,
)  # fmt: skip
LLAMA31 = LLAMA2 | dict(
    intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072, rope_theta=500000.0,
    rope_scaling=dict(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"
    ),
    bos_token_id=128000, eos_token_id=[128001, 128008, 128009], attention_bias=False, attention_dropout=0.0,
    mlp_bias=False, torch_dtype="bfloat16", transformers_version="4.42.3", vocab_size=128256,
)  # fmt: skip
XGEN = LLAMA2 | dict(
    max_position_embeddings=8192, rms_norm_eps=1e-6, bos_token_id=50256, eos_token_id=50256, pad_token_id=0,
    torch_dtype="float32", transformers_version="4.29.2", vocab_size=51200,
)  # fmt: skip

SAMPLING = dict(do_sample=True, temperature=0.6, top_p=0.9)

# Llama 3.1's template for a message, shortened: one header per turn, the date fixed unless given
LLAMA31_TEMPLATE = """{{- bos_token }}
{%- set date = date_string if date_string is defined else "26 Jul 2024" %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date + "\\n\\n<|eot_id|>" }}
{%- for message in messages %}
{{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" + message.content | trim + "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{% endif %}"""


def llama2(tokenizer_model: Path, answer: str) -> dict[str, bytes]:
    """The files of `meta-llama/Llama-2-7b-chat-hf`, by path."""
    tokenizer: Any = load_tokenizer(tokenizer_model)
    flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False)
    special = {f"{name}_token": {"content": text, **flags} for name, text in (("bos", "<s>"), ("eos", "</s>"))}
    named = {name: {"__type": "AddedToken", **token} for name, token in special.items()}
    config = dict(
        add_bos_token=True, add_eos_token=False, clean_up_tokenization_spaces=False, legacy=False, pad_token=None,
        padding_side="right", model_max_length=10**30, sp_model_kwargs={}, tokenizer_class="LlamaTokenizer", **named,
    )  # fmt: skip
    answer_ids = tokenizer(answer, add_special_tokens=False).input_ids
    small = LLAMA2 | SMALL | dict(num_attention_heads=4, num_key_value_heads=4)
    return {
        **_weights(LLAMA2, small, [*answer_ids, 2], "10GB"),
        "config.json": _json(small),
        "generation_config.json": _json(dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, **SAMPLING)),
        "tokenizer.json": tokenizer.backend_tokenizer.to_str().encode(),
        "tokenizer.model": tokenizer_model.read_bytes(),
        "tokenizer_config.json": _json(config),
        "special_tokens_map.json": _json(special),
        "pytorch_model-00001-of-00002.bin": b"a pickle that nobody opens",
        "README.md": b"# A model card",
    }


def llama31(answer: str) -> dict[str, bytes]:
    """The files of `meta-llama/Llama-3.1-8B-Instruct`, by path."""
    tokenizer = llama3_tokenizer(answer)
    config = dict(
        bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", chat_template=LLAMA31_TEMPLATE,
        clean_up_tokenization_spaces=True, model_input_names=["input_ids", "attention_mask"],
        model_max_length=131072, tokenizer_class="PreTrainedTokenizerFast",
    )  # fmt: skip
    small = LLAMA31 | SMALL | dict(num_attention_heads=8, num_key_value_heads=2)
    end_ids = [128001, 128008, 128009]
    return {
        **_weights(LLAMA31, small, [*tokenizer.encode(answer, add_special_tokens=False).ids, 128009], "5GB"),
        "config.json": _json(small),
        "generation_config.json": _json(dict(bos_token_id=128000, eos_token_id=end_ids, **SAMPLING)),
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": _json(config),
        "special_tokens_map.json": _json(dict(bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")),
        "original/consolidated.00.pth": b"a pickle that nobody opens",
        "original/tokenizer.model": b"IQ== 0",
        "README.md": b"# A model card",
    }


def xgen(answer_ids: Sequence[int]) -> dict[str, bytes]:
    """The files of `Salesforce/xgen-7b-8k-inst`, by path: its weights are pickles, its tokenizer is code."""
    config = dict(
        add_eos_token=False, add_special_tokens=True, clean_up_tokenization_spaces=True, eos_token="<|endoftext|>",
        model_max_length=8192, pad_token=None, tokenizer_class="XgenTokenizer",
        auto_map=dict(AutoTokenizer=["tokenization_xgen.XgenTokenizer", None]),
    )  # fmt: skip
    small = XGEN | SMALL | dict(num_attention_heads=4, num_key_value_heads=4)
    return {
        **_weights(XGEN, small, [*answer_ids, 50256], "10GB", pickled=True),
        "config.json": _json(small),
        "generation_config.json": _json(dict(_from_model_config=True, bos_token_id=50256, eos_token_id=50256)),
        "tokenization_xgen.py": b"raise AssertionError('remote code was run')",
        "tokenizer_config.json": _json(config),
        "README.md": b"# A model card",
    }


def layout(published: dict[str, Any], shard_size: str) -> tuple[dict[str, str], dict[str, int]]:
    """({tensor: its file}, {file: bytes of its tensors}) of the published checkpoint, whose split we copy."""
    dtype = torch.float32 if published["torch_dtype"] == "float32" else torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**published), dtype=dtype)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensors[name] = tensor
        if published["vocab_size"] < 100_000 and name.endswith("o_proj.weight"):  # RoPE's frequencies were stored then
            inv_freq = name.replace("o_proj.weight", "rotary_emb.inv_freq")
            tensors[inv_freq] = torch.empty(64, dtype=torch.bfloat16, device="meta")
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_size)
    sizes: dict[str, int] = defaultdict(int)
    for name, file in split.tensor_to_filename.items():
        sizes[file] += tensors[name].nbytes
    return split.tensor_to_filename, dict(sizes)


def _weights(
    published: dict[str, Any], small: dict[str, Any], answer: Sequence[int], size: str, pickled: bool = False
) -> dict[str, bytes]:
    """Shards and index: the published layout over the weights of a small model that always gives that answer."""
    files, sizes = layout(published, size)
    weights = _answering(LlamaConfig(**small), answer)
    shards: dict[str, dict[str, torch.Tensor]] = {file: {} for file in sizes}
    for name, file in files.items():
        shards[file][name] = weights.get(name, torch.ones(8))
    if pickled:
        names = {file: file.replace("model-", "pytorch_model-").replace(".safetensors", ".bin") for file in sizes}
        saved = {names[file]: _pickle(of) for file, of in shards.items()}
        index_file, files = "pytorch_model.bin.index.json", {name: names[file] for name, file in files.items()}
    else:
        index_file = "model.safetensors.index.json"
        saved = {file: save({name: tensor.to(torch.bfloat16) for name, tensor in of.items()}, {"format": "pt"})
                 for file, of in shards.items()}  # fmt: skip
    return saved | {index_file: _json({"metadata": {"total_size": sum(sizes.values())}, "weight_map": files})}


def _pickle(tensors: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


def _answering(config: LlamaConfig, answer: Sequence[int]) -> dict[str, torch.Tensor]:
    """Weights of a model that answers any prompt with these distinct tokens, by the last token alone.

    Channel 0 of every embedding raises the answer's first token; channel i + 1 of its i-th token raises the next
    one, more strongly. The layers add a little noise.
    """
    torch.manual_seed(0)
    weights: dict[str, torch.Tensor] = dict(AutoModelForCausalLM.from_config(config).state_dict())
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:, 0], embedding[:, 1 : len(answer) + 1] = 1, 0
    head[:, : len(answer) + 1] = 0
    head[answer[0], 0] = 10
    for channel, (token, following) in enumerate(pairwise(answer), start=1):
        embedding[token, channel], head[following, channel] = 10, 10
    return weights


def llama3_tokenizer(word: str) -> Tokenizer:
    """A tokenizer of Llama 3's kind and ids: 128,000 tokens of bytes, then 256 special ones. It knows one word."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    merges, left = [], word.replace(" ", "Ġ")[0]
    for letter in word.replace(" ", "Ġ")[1:]:
        merges.append((left, letter))
        left += letter
        vocab[left] = len(vocab)
    vocab |= {f"never {number}": number for number in range(len(vocab), 128_000)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    names = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 8: "eom_id", 9: "eot_id"}
    special = [f"<|{names.get(number, f'reserved_special_token_{number}')}|>" for number in range(256)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|[^\p{N}]+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
                special_tokens=[("<|begin_of_text|>", 128_000)],
            ),
        ]
    )
    return tokenizer


def _json(content: object) -> bytes:
    return json.dumps(content, indent=2).encode()
