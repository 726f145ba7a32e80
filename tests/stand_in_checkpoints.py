"""Stand-ins for checkpoints of Llama 2 7B chat and XGen 7B: the same kinds of files.

Settings are those of the originals. Only the width is small, and the weights give one answer to
every prompt.
"""

import io
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load
from transformers import LlamaConfig, LlamaForCausalLM

from lazyllm.models.tokenizers import load_tokenizer

LLAMA2 = dict(
    hidden_size=64, intermediate_size=64, num_hidden_layers=32, num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=4096, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2,
    vocab_size=32000,
)  # fmt: skip
XGEN = LLAMA2 | dict(
    max_position_embeddings=8192, rms_norm_eps=1e-6, bos_token_id=50256, eos_token_id=50256,
    vocab_size=51200,
)  # fmt: skip
SAMPLING = dict(do_sample=True, temperature=0.6, top_p=0.9)


def llama2(tokenizer_model: Path, answer: str) -> dict[str, bytes]:
    """Files as of `meta-llama/Llama-2-7b-chat-hf`, by path."""
    tokenizer: Any = load_tokenizer(tokenizer_model)
    flags = dict(lstrip=False, normalized=False, rstrip=False, single_word=False)
    tokens = {
        name: {"__type": "AddedToken", "content": text, **flags}
        for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"))
    }
    settings = dict(
        add_bos_token=True,
        add_eos_token=False,
        legacy=False,
        tokenizer_class="LlamaTokenizer",
        **tokens,
    )
    return {
        **_weights(LLAMA2, [*tokenizer(answer, add_special_tokens=False).input_ids, 2]),
        "generation_config.json": _json(
            dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, **SAMPLING)
        ),
        "tokenizer.json": tokenizer.backend_tokenizer.to_str().encode(),
        "tokenizer.model": tokenizer_model.read_bytes(),
        "tokenizer_config.json": _json(settings),
        "pytorch_model-00001-of-00002.bin": b"a pickle that nobody opens",
        "README.md": b"# A model card",
    }


def xgen(answer: Sequence[int]) -> dict[str, bytes]:
    """Files as of `Salesforce/xgen-7b-8k-inst`, by path: its weights are pickles, its tokenizer
    is code.
    """
    settings = dict(
        tokenizer_class="XgenTokenizer",
        auto_map=dict(AutoTokenizer=["tokenization_xgen.XgenTokenizer", None]),
        add_special_tokens=True, eos_token="<|endoftext|>", model_max_length=8192, pad_token=None,
    )  # fmt: skip
    files = _weights(XGEN, [*answer, 50256])
    shards = {
        name: name.replace("model", "pytorch_model").replace(".safetensors", ".bin")
        for name in files
    }
    index = json.loads(files.pop("model.safetensors.index.json"))
    index["weight_map"] = {tensor: shards[name] for tensor, name in index["weight_map"].items()}
    for name in [name for name in files if name.endswith(".safetensors")]:
        pickled = io.BytesIO()
        torch.save(load(files.pop(name)), pickled)
        files[shards[name]] = pickled.getvalue()
    return files | {
        "pytorch_model.bin.index.json": _json(index),
        "generation_config.json": _json(dict(bos_token_id=50256, eos_token_id=50256)),
        "tokenization_xgen.py": b"raise AssertionError('remote code was run')",
        "tokenizer_config.json": _json(settings),
    }


def _weights(settings: dict[str, Any], answer: Sequence[int]) -> dict[str, bytes]:
    """config.json, shards and index of a model that answers any prompt with these distinct tokens,
    by the last token.

    Channel 0 of every embedding raises the answer's first token; channel i + 1 of its i-th token
    raises the next one, more strongly. The layers add a little noise.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    embedding, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    embedding[:, 0], embedding[:, 1 : len(answer) + 1] = 1, 0
    head[:, : len(answer) + 1] = 0
    head[answer[0], 0] = 10
    for channel, (token, following) in enumerate(pairwise(answer), start=1):
        embedding[token, channel], head[following, channel] = 10, 10
    with TemporaryDirectory() as folder:
        model.bfloat16().save_pretrained(folder, max_shard_size="5MB")
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _json(content: object) -> bytes:
    return json.dumps(content, indent=2).encode()
