"""`scripts/dev/train.py` and the shipped tiny model: tokenizers, sequences, first models, short trainings."""

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from eval.benchmarks import embedded
from lazyllm.presets import PRESETS
from scripts.dev import train
from scripts.dev.train import IGNORE, STAGES

TINY = Path(PRESETS["tiny"].source)
TEXTS = {
    f"{package}/{name}.py": "".join(
        f"def {name}_{i}(self, value):\n    return self.{package}[value] + {i}\n" for i in range(40)
    )
    for package in ("json", "email")
    for name in ("reader", "writer")
}


@pytest.fixture(scope="module")
def tiny_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def coder(monkeypatch: pytest.MonkeyPatch) -> train.CoderTrainer:
    monkeypatch.setattr(train, "training_files", lambda: TEXTS)
    return train.CoderTrainer()


def test_suite_words_newline_and_specials_are_single_tokens(tiny_tokenizer) -> None:
    words = *embedded.keys(), *embedded.VALUES, *embedded.CLASSES, *embedded.ORDINALS
    for word in [*(f" {word}" for word in words), "\n", ".", ";", ":"]:
        assert len(tiny_tokenizer(word, add_special_tokens=False).input_ids) == 1, word
    assert tiny_tokenizer("x").input_ids[0] == tiny_tokenizer.bos_token_id
    assert tiny_tokenizer.eos_token == embedded.END


def test_first_coder_model_has_tinys_logits() -> None:
    from transformers import AutoModelForCausalLM

    model = train.coder_model().double()
    tiny = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    ids = torch.randint(3, 923, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert model.config.num_hidden_layers == 12
        torch.testing.assert_close(model(ids).logits[..., :923], tiny(ids).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("stage", [STAGES[0], STAGES[-1]])
@pytest.mark.parametrize("name", embedded.NAMES)
def test_task_sequence_has_its_length_labels_and_questions(stage: train.Stage, name: str) -> None:
    rng, questions = random.Random(5), 0
    for _ in range(3):
        ids, labels = train.task_sequence(rng, name, stage)
        assert len(ids) == len(labels) <= stage.length
        assert all(label in (IGNORE, token) for token, label in zip(ids, labels, strict=True))
        questions += labels.count(train.IDS[embedded.END])
    assert questions


def test_training_question_is_written_as_the_suite_writes_it(tiny_tokenizer) -> None:
    """Context, question and answer of the first question of a sequence, decoded, are the template filled in."""
    for name in embedded.NAMES:
        ids, labels = train.task_sequence(random.Random(9), name, STAGES[4])
        start = next(place for place, label in enumerate(labels) if label != IGNORE)
        text = tiny_tokenizer.decode(ids[1:start])
        before, between = (part.strip(" ") for part in embedded.TEMPLATES[name].split("{context}"))
        assert text.startswith(before)
        assert between.removesuffix("{input}").strip() in text
        assert tiny_tokenizer(text).input_ids == ids[:start]


def test_task_sequence_never_asks_a_question_of_the_test_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "is_test", lambda context, question: True)
    _, labels = train.task_sequence(random.Random(0), "lookup", STAGES[4])
    assert set(labels) == {IGNORE}


def test_copy_sequence_repeats_earlier_pairs() -> None:
    for seed in range(20):
        ids, labels = train.copy_sequence(random.Random(seed), 128)
        assert len(ids) == len(labels) == 128
        for i, label in enumerate(labels):
            if label != IGNORE:
                assert (ids[i - 1], label) in [(ids[j - 1], ids[j]) for j in range(1, i)]


@pytest.mark.parametrize("kind", [*train.KINDS])
def test_coder_sequence_has_its_length_and_labels(coder: train.CoderTrainer, kind: str) -> None:
    ids, labels = coder.sequence(kind, 1024)
    assert len(ids) == len(labels) == 1024 or (kind == "tasks" and len(ids) < 1024)
    assert all(label in (IGNORE, token) for token, label in zip(ids, labels, strict=True))
    assert set(labels) != {IGNORE}


def test_cross_sequence_ends_in_a_file_behind_files_of_its_package(coder) -> None:
    text = coder.tokenizer.decode(coder.cross(1024))
    assert {"json", "email"} - {line.split("/")[0][2:] for line in text.split("\n") if line.startswith("# ")}
    assert text.count("# ") > 1


def test_training_text_holds_no_held_out_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http/client.py", "http/test/x.py", "json/decoder.py", "test/test_http.py", "test/test_json/a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    monkeypatch.setattr(train.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert train.is_held_out("http/client.py")
    assert [*train.training_files()] == ["json/decoder.py", "test/test_json/a.py"]


@pytest.mark.parametrize("name", ["tiny", "coder"])
def test_training_ends_with_a_model_and_is_the_same_each_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = train.Stage(128, 6, tokens=256), train.Stage(64, 3, tokens=128, rate=0.5, decay=1024)
    monkeypatch.setattr(torch.optim, "Muon", partial(torch.optim.Muon, ns_steps=1))  # of 5, which take most of the time
    changed = {"TOKENS_PER_STEP": 128, "CODER_TOKENS": 384, "SHOW_EVERY": 1, "LENGTHS": (128,) * 4, "STAGES": stages}
    for constant, value in {**changed, "training_files": lambda: TEXTS}.items():
        monkeypatch.setattr(train, constant, value)
    for folder in ("once", "again"):
        trainer = train.TinyTrainer() if name == "tiny" else train.CoderTrainer()
        trainer.train(tmp_path / folder)
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
        assert [(line["tokens"], line["length"]) for line in lines] == [
            (128, 128), (256, 128), (384, 64 if name == "tiny" else 128),
        ]  # fmt: skip
    once, again = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("once", "again"))
    assert once == again
    assert 0 < len(once) < 20e6
