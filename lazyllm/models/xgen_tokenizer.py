"""XGen 7B's tokenizer, without its repository's code.

The checkpoint's tokenizer is Python code over tiktoken. It is not run here, and fails from
transformers 4.34 on. This fast tokenizer of transformers has the same ids, and also gives each
token's characters (offsets):

- ids 0 to 50256 are GPT-2's: 256 bytes, 50,000 merges, `<|endoftext|>`. All follow from GPT-2's
  `merges.txt`.
- ids 50257 to 50294 are runs of 31 down to 2 spaces, then of 9 down to 2 tabs. They are not added
  tokens, which would be cut out of the text first. They are merged like GPT-2's tokens, after all
  of GPT-2's merges and within the pieces of GPT-2's pattern (the last space before a word belongs
  to the word). tiktoken merges the pair that makes the lowest id, so longer runs first: the
  leftmost run grows to its full length, then the next one starts.
- ids 50295 to 50312 are StarCoder's control tokens. They are recognised in a text, and
  `skip_special_tokens` keeps them: only `<|endoftext|>` is special.

The model has 51,200 rows of embeddings; ids from 50313 on have no token and decode to "".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.errors import UserError
from lazyllm.models.checkpoint import hub_folder, read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
# GPT-2 writes a space as Ġ and a tab as ĉ; in the order of the ids
LONGEST_RUN = {"Ġ": 31, "ĉ": 9}
CONTROL_TOKENS = (
    "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<filename>", "<gh_stars>",
    "<issue_start>", "<issue_comment>", "<issue_closed>",
    "<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>", "<empty_output>",
    "<commit_before>", "<commit_msg>", "<commit_after>", "<reponame>",
)  # fmt: skip

GPT2 = "openai-community/gpt2"
MERGES = "merges.txt"
# of merges.txt in that repository, OpenAI's `vocab.bpe`, which tiktoken checks by the same hash
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

# Keys of the checkpoint's tokenizer_config.json that change ids, with XGen 7B's values
_EXPECTED = {"eos_token": END_OF_TEXT, "add_eos_token": False, "add_special_tokens": True}
_INSTEAD = (
    f"XGen's tokenizer is made from GPT-2's {MERGES}: put "
    f"https://huggingface.co/{GPT2}/blob/main/{MERGES} into a folder with the checkpoint's "
    "tokenizer_config.json, and give model.tokenizer=FOLDER"
)


def load_xgen_tokenizer(config_file: Path) -> PreTrainedTokenizerFast:
    """Make the tokenizer of an XGen 7B checkpoint, with GPT-2's merges beside it or on the hub.

    config_file: the checkpoint's `tokenizer_config.json`; its chat template, maximal length and
        padding token are used.
    Raises UserError if the config is of another tokenizer, or if GPT-2's `merges.txt` is missing or
    another file.
    """
    config = read_json(config_file, str(config_file.parent))
    for key, expected in _EXPECTED.items():
        if (value := config.get(key, expected)) != expected:
            raise UserError(f"{config_file}: {key} is {value!r}, expected XGen 7B's {expected!r}")
    used = ("chat_template", "model_max_length")
    settings = {key: config[key] for key in used if config.get(key) is not None}
    folder = config_file.parent
    if not (folder / MERGES).is_file():
        folder = hub_folder(GPT2, [MERGES], instead=_INSTEAD)
    tokenizer = xgen_tokenizer(read_merges(folder / MERGES), **settings)
    if (padding := config.get("pad_token")) is not None:
        if padding not in (END_OF_TEXT, *CONTROL_TOKENS):
            raise UserError(
                f"{config_file}: pad_token is {padding!r}, which is not one of XGen 7B's tokens"
            )
        tokenizer.pad_token = padding
    return tokenizer


def read_merges(merges_file: Path) -> list[tuple[str, str]]:
    """Read GPT-2's merges, in the characters that stand for bytes. Raises UserError for others."""
    content = merges_file.read_bytes()
    if (sha256 := hashlib.sha256(content).hexdigest()) != MERGES_SHA256:
        raise UserError(
            f"{merges_file}: not GPT-2's {MERGES}: its sha256 is {sha256}, expected "
            f"{MERGES_SHA256}. {_INSTEAD}"
        )
    lines = content.decode("utf-8").splitlines()[1:]  # the first line is the format's version
    return [(left, right) for left, right in (line.split(" ") for line in lines)]


def xgen_tokenizer(merges: Sequence[tuple[str, str]], **settings: Any) -> PreTrainedTokenizerFast:
    """Make XGen's tokenizer over `read_merges`; it adds no BOS and no EOS.

    settings: of `PreTrainedTokenizerFast`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # GPT-2's characters of the 256 bytes have, sorted, the order of its ids
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = [*alphabet, *(left + right for left, right in merges), END_OF_TEXT]
    # The merges that make runs of blanks, by id: a run and one blank, longest run first
    runs = [
        (blank * (length - 1), blank)
        for blank, longest in LONGEST_RUN.items()
        for length in range(longest, 1, -1)
    ]
    vocab = {token: number for number, token in enumerate([*base, *map("".join, runs)])}
    backend: Any = Tokenizer(models.BPE(vocab=vocab, merges=[*merges, *runs]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    control = [AddedToken(token, special=False, normalized=False) for token in CONTROL_TOKENS]
    backend.add_tokens(control)
    # XGen's own tokenizer decodes without the clean-up ("is ?" would become "is?")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        **settings,
    )
