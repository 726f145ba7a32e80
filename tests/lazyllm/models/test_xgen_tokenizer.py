"""XGen 7B's tokenizer against tiktoken itself, on the ranks that the published code would give it.

The tests run on 50,000 pairs of bytes (merges of GPT-2's number, without a run of blanks), and real rows on GPT-2's own
merges if `../shared/tokenizers/gpt2` is there.
"""

import hashlib
import inspect
import json
import random
import shutil
import sys
import unicodedata
from itertools import groupby, product
from pathlib import Path

import pytest
import tiktoken
from tiktoken_ext import openai_public
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lazyllm.errors import UserError
from lazyllm.models import xgen_tokenizer as xgen
from lazyllm.models.tokenizers import load_tokenizer, load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.hub_server import Repository

CHARACTERS = [code for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]  # no surrogates
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}

# The published ids, counted out by hand: 50257 + 30 runs of spaces + 8 runs of tabs = 50295, + 18 control tokens.
SPACES = {length: 50257 + (31 - length) for length in range(2, 32)}
TABS = {length: 50287 + (9 - length) for length in range(2, 10)}
CONTROL_NAMES = [
    "fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "filename", "gh_stars", "issue_start", "issue_comment",
    "issue_closed", "jupyter_start", "jupyter_text", "jupyter_code", "jupyter_output", "empty_output", "commit_before",
    "commit_msg", "commit_after", "reponame",
]  # fmt: skip
CONTROLS = {f"<{name}>": 50295 + number for number, name in enumerate(CONTROL_NAMES)}


@pytest.fixture(scope="module")
def merges_file(tmp_path_factory) -> Path:
    """50,000 pairs of bytes, so that no test needs GPT-2's own merges."""
    pairs = [pair for pair in product(sorted(BYTE_OF), repeat=2) if "".join(pair) not in ("ĠĠ", "ĉĉ")]
    random.Random(0).shuffle(pairs)
    file = tmp_path_factory.mktemp("gpt2") / "merges.txt"
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in pairs[:50_000]), ""]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def file(request) -> Path:
    if getattr(request, "param", "") == "gpt2":
        return request.getfixturevalue("shared") / "tokenizers" / "gpt2" / "merges.txt"
    return request.getfixturevalue("merges_file")


@pytest.fixture(scope="module")
def tokenizer(file):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xgen, "MERGES_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
        return xgen.xgen_tokenizer(xgen.read_merges(file))


@pytest.fixture(scope="module")
def oracle(file) -> tiktoken.Encoding:
    """tiktoken's encoding as the published code describes it: runs among the ranks, control tokens apart."""

    def as_bytes(token: str) -> bytes:
        return bytes(BYTE_OF[character] for character in token)

    pairs = [line.split(" ") for line in file.read_text(encoding="utf-8").split("\n")[1:-1]]
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    ranks = {bytes([byte]): rank for rank, byte in enumerate(printable)}
    for byte in range(256):
        ranks.setdefault(bytes([byte]), len(ranks))
    for left, right in pairs:
        ranks[as_bytes(left + right)] = len(ranks)
    assert len(ranks) == 50256
    ranks |= {b" " * length: rank for length, rank in SPACES.items()}
    ranks |= {b"\t" * length: rank for length, rank in TABS.items()}
    return tiktoken.Encoding(
        "xgen",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50256} | CONTROLS,
        explicit_n_vocab=None,
    )


def random_texts(count: int) -> list[str]:
    """Texts that are hard here: runs of blanks around everything else, other scripts, bytes, tokens written out."""
    draw = random.Random(1)
    kinds = [
        *(lambda: " " * draw.randint(1, 70) for _ in range(3)),
        *(lambda: "\t" * draw.randint(1, 25) for _ in range(2)),
        lambda: "".join(draw.choice(" \t\n\r\x0b\x0c\xa0\u2003\u3000") for _ in range(draw.randint(1, 12))),
        lambda: draw.choice(["the", "Return", "self.", "def f(x):", "I'll", "don't've", "12345", "ab12"]),
        lambda: draw.choice(["日本語", "한국", "naïve", "😀", "e\u0301", "\u200b", "\ufffd", "Ġ", "ĉĉ", "\x00\x1c"]),
        lambda: draw.choice([*CONTROLS, "<|endoftext|>", "<fim_", "prefix>", "<|endoftext", "|>"]),
        lambda: chr(draw.choice(CHARACTERS)),
        lambda: draw.choice(["\n", "\n\n", "\r\n", "---", "====", "#", ".", "'"]),
    ]
    return ["".join(draw.choice(kinds)() for _ in range(draw.randint(1, 12))) for _ in range(count)]


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, verbose=False).input_ids


def test_every_id_is_the_bytes_that_tiktoken_has_for_it(tokenizer, oracle):
    assert len(tokenizer) == oracle.n_vocab == 50313
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.all_special_ids) == (None, "<|endoftext|>", [50256])
    for number, token in enumerate(tokenizer.convert_ids_to_tokens(range(50313))):
        if number == 50256 or number in CONTROLS.values():
            assert token.encode() == oracle.decode_single_token_bytes(number)
        else:
            assert bytes(BYTE_OF[character] for character in token) == oracle.decode_single_token_bytes(number), number


def test_ids_and_texts_are_tiktokens(tokenizer, oracle):
    """Of all runs of blanks, control tokens, random texts, and the first character of each of Unicode's categories in a
    row, between letters, digits and blanks."""
    groups = groupby(map(chr, CHARACTERS), unicodedata.category)
    blanks = [blank * length + after for blank in " \t" for length in range(1, 70) for after in ("", "x")]
    texts = [*blanks, *CONTROLS, *(f"a{character}1{character} " for _, (character, *_) in groups), *random_texts(500)]
    for text, ids in zip(texts, tokenizer(texts, verbose=False).input_ids, strict=True):
        assert ids == oracle.encode(text, allowed_special="all"), repr(text)
        assert tokenizer.decode(ids) == text
        kept = [number for number in ids if number != 50256]  # as the published code: control tokens stay
        assert tokenizer.decode(ids, skip_special_tokens=True) == oracle.decode(kept), repr(text)


def test_cut_text_is_decoded_as_tiktoken_does(tokenizer, oracle):
    """Half of a truncated prompt may end inside a character; random ids mostly are no UTF-8 at all."""
    draw = random.Random(2)
    for _ in range(200):
        ids = [draw.randrange(50313) for _ in range(draw.randint(1, 20))]
        assert tokenizer.decode(ids) == oracle.decode(ids), ids


def test_ids_without_a_token_decode_to_nothing(tokenizer, oracle):
    for number in range(50313, 51200):
        assert tokenizer.decode([number]) == tokenizer.decode(number) == ""
    ids = oracle.encode("A cat   sat.")
    assert tokenizer.decode([50313, *ids[:3], 51199, 50500, *ids[3:], 50400]) == "A cat   sat."
    assert tokenizer.decode([50313, *ids, 51199], skip_special_tokens=True) == "A cat   sat."
    assert tokenizer.batch_decode([[51199], [*ids, 50313]]) == ["", "A cat   sat."]


def test_offsets_are_the_characters_of_each_token(tokenizer, oracle):
    text = "def f(x):\n        return x  \t\t\t# 日本 naïve <reponame>   done"
    encoded = tokenizer(text, return_offsets_mapping=True)
    covered = 0
    for number, (start, end) in zip(encoded.input_ids, encoded.offset_mapping, strict=True):
        assert start <= covered <= end, "no gap; tokens of one character share it"
        covered = max(covered, end)
        piece = oracle.decode_single_token_bytes(number)
        if piece.isascii():
            assert text[start:end].encode() == piece
        else:
            assert piece in text[start:end].encode()
    assert covered == len(text)


@pytest.mark.slow
@pytest.mark.parametrize("file", ["gpt2"], indirect=True)
def test_real_rows_have_tiktokens_ids_and_come_back(tokenizer, oracle, shared):
    rows = 0
    for file in sorted((shared / "longbench").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            for text in (row["context"], row["input"]):
                ids = ids_of(tokenizer, text)
                assert ids == oracle.encode(text, allowed_special="all"), (file.name, row["_id"])
                assert tokenizer.decode(ids, skip_special_tokens=True) == text, (file.name, row["_id"])
                for half in (ids[:3750], ids[-3750:]):  # as prompts of more than 7,500 tokens are cut
                    assert tokenizer.decode(half, skip_special_tokens=True) == oracle.decode(half)
            rows += 1
    assert rows > 50
    assert ids_of(tokenizer, "Hello world\n\n") == [15496, 995, 628]  # GPT-2's published ids


CONFIG = {
    "tokenizer_class": "XgenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_xgen.XgenTokenizer", None]},
    "eos_token": "<|endoftext|>",
    "pad_token": None,
    "add_eos_token": False,
    "add_special_tokens": True,
    "clean_up_tokenization_spaces": True,
    "model_max_length": 8192,
}


@pytest.fixture
def checkpoint(merges_file, tmp_path, monkeypatch):
    """A copy of the tokenizer's files of XGen's folder, with merges. Its code must not be run."""
    monkeypatch.setattr(xgen, "MERGES_SHA256", hashlib.sha256(merges_file.read_bytes()).hexdigest())
    (tmp_path / "tokenization_xgen.py").write_text("raise AssertionError('remote code was run')")
    shutil.copy(merges_file, tmp_path / "merges.txt")

    def with_config(**changes: object) -> Path:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG | changes))
        return tmp_path

    return with_config


@pytest.mark.parametrize("changes", [{}, {"chat_template": "{{ 1 }}", "pad_token": "<|endoftext|>"}])
def test_checkpoint_of_xgen_is_loaded_with_its_settings(checkpoint, changes):
    tokenizer = load_tokenizer(checkpoint(**changes))
    assert ids_of(tokenizer, "        <reponame>") == [SPACES[8], CONTROLS["<reponame>"]]
    assert tokenizer.decode(ids_of(tokenizer, "y is ?")) == "y is ?"
    assert (tokenizer.eos_token_id, tokenizer.model_max_length) == (50256, 8192)
    assert (tokenizer.pad_token, tokenizer.chat_template) == (changes.get("pad_token"), changes.get("chat_template"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokenizer_class": "Xgen15BTokenizer"}, r"neither tokenizer\.json nor tokenizer\.model"),
        ({"eos_token": "</s>"}, "eos_token"),
        ({"add_eos_token": True}, "add_eos_token"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"pad_token": "<pad>"}, "pad_token"),
    ],
)
def test_checkpoint_of_another_tokenizer_is_refused(checkpoint, changes, named):
    with pytest.raises(UserError, match=named):
        load_tokenizer(checkpoint(**changes))


def test_saved_tokenizer_is_loaded_again_without_merges(checkpoint, tmp_path):
    tokenizer = load_tokenizer(checkpoint())
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.eos_token_id, len(again), again.all_special_ids) == (50256, 50313, [50256])
    for text in random_texts(100):
        ids = ids_of(tokenizer, text)
        assert ids_of(again, text) == ids
        assert again.decode(ids) == text
    assert again.decode(list(CONTROLS.values()), skip_special_tokens=True) == "".join(CONTROLS)


def test_hash_of_merges_is_the_one_that_tiktoken_checks():
    assert f'vocab_bpe_hash="{xgen.MERGES_SHA256}"' in inspect.getsource(openai_public.gpt2)


@pytest.mark.parametrize(
    ("name", "content", "remedy"),
    [
        ("merges.txt", "#version: 0.2\na b\n", r"model\.tokenizer=FOLDER"),
        ("tokenizer_config.json", "{", "could not be used"),
    ],
)
def test_damaged_files_are_refused(checkpoint, name, content, remedy):
    folder = checkpoint()
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name}.*{remedy}"):
        load_tokenizer(folder)


def test_preset_takes_gpt2s_merges_from_the_hub(checkpoint, merges_file, hub):
    folder = checkpoint()
    (folder / "merges.txt").unlink()
    hub.repositories["Salesforce/xgen-7b-8k-inst"] = Repository.of(folder)
    hub.repositories["openai-community/gpt2"] = Repository.of(merges_file.parent)
    tokenizer = load_tokenizer_of(ModelSpec("xgen"))
    assert tokenizer is not None
    assert (tokenizer.eos_token_id, len(tokenizer)) == (50256, 50313)


def test_missing_merges_are_refused_offline_with_their_address(checkpoint, offline):
    folder = checkpoint()
    (folder / "merges.txt").unlink()
    where = r"not in the hub's cache\. .*https://huggingface\.co/openai-community/gpt2/.*merges\.txt into a folder with"
    with pytest.raises(UserError, match=where):
        load_tokenizer(folder)
