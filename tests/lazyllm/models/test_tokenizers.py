"""Tokenizers equal their authors': Llama 2's is compared with the sentencepiece library itself."""

import json
import random
import shutil

import pytest

from lazyllm.errors import UserError
from lazyllm.models.tokenizers import chat_templates, load_tokenizer
from tests.eval.official import LLAMA2, llama2, needs, sentencepiece

needs_llama2 = needs(LLAMA2)


def texts(count: int) -> list[str]:
    """Texts that are hard for a converted tokenizer: runs of spaces and signs, a space first,
    other scripts, bytes.
    """
    draw = random.Random(0)
    kinds = [
        "aeinst",
        "  \n\t",
        "01",
        ".-_=*#",
        "=====",
        "éü日本語한",
        "😀\x00\ufffd\u2581",
        "The See private ",
    ]
    return [
        "".join(draw.choice(draw.choice(kinds)) for _ in range(draw.randint(1, 40)))
        for _ in range(count)
    ]


@needs_llama2
def test_llama2s_ids_are_sentencepieces():
    assert len(llama2()) == sentencepiece().get_piece_size() == 32000
    assert (
        (llama2().bos_token_id, llama2().eos_token_id)
        == (sentencepiece().bos_id(), sentencepiece().eos_id())
        == (1, 2)
    )
    for text in [
        "",
        " ",
        "  ",
        " x",
        "is.  See the\n",
        "\n        private static",
        " " * 40 + "x",
        *texts(2000),
    ]:
        assert llama2()(text).input_ids == [1, *sentencepiece().encode(text)], repr(text)


@needs_llama2
def test_llama2s_texts_are_sentencepieces():
    for text in texts(300):
        ids = sentencepiece().encode(text)
        whole_characters = "\ufffd" not in sentencepiece().decode(ids[len(ids) // 2 :])
        if (
            whole_characters
        ):  # inside a character the two spell the rest of its bytes in other numbers of U+FFFD
            assert llama2().decode(ids[len(ids) // 2 :]) == sentencepiece().decode(
                ids[len(ids) // 2 :]
            ), repr(text)
        assert llama2().decode([1, *ids], skip_special_tokens=True) == sentencepiece().decode(
            ids
        ), repr(text)


@needs_llama2
def test_tokenizer_json_made_of_a_model_file_has_the_same_ids(tmp_path):
    llama2().save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.model").exists()
    again = load_tokenizer(tmp_path)
    for text in texts(500):
        # transformers puts no space in front of a text that begins with one; LongBench's prompts do
        # not.
        text = text.lstrip(" \u2581") or "x"
        assert again(text).input_ids == [1, *sentencepiece().encode(text)], repr(text)


@needs_llama2
def test_settings_beside_the_file_are_used(tmp_path):
    shutil.copy(LLAMA2 / "tokenizer.model", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": False, "chat_template": "x"})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template == "x"
    (tmp_path / "chat_template.jinja").write_text("y")  # as in transformers, it goes before
    for source in (tmp_path, tmp_path / "tokenizer.model"):
        tokenizer = load_tokenizer(source)
        assert (tokenizer("Hello").input_ids, tokenizer.chat_template) == ([15043], "y")
        assert chat_templates(source) == "x\ny"


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_path_to_nothing_is_refused(source):
    with pytest.raises(UserError, match="no such file or folder"):
        load_tokenizer(source)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.txt", b"", r"neither tokenizer\.json nor tokenizer\.model"),
        ("tokenizer.model", b"", "not a sentencepiece model|of another kind"),
        # Llama 3's: tiktoken's
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "not a sentencepiece model|of another kind"),
        ("tokenizer.json", b"{", r"model\.tokenizer=FOLDER"),
    ],
)
def test_folder_without_a_usable_tokenizer_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_sentencepiece_model_of_another_kind_is_refused(tmp_path):
    import sentencepiece

    (tmp_path / "text").write_text("a cat sat on a mat\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=20,
        model_type="unigram",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(UserError, match="of another kind than Llama's"):
        load_tokenizer(tmp_path)


def test_hub_id_is_refused_offline_with_the_remedy(offline):
    with pytest.raises(
        UserError, match=r"some/model: .*not in the hub's cache.*model\.tokenizer=FOLDER"
    ):
        load_tokenizer("some/model")
