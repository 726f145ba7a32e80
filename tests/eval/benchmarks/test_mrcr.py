"""MRCR: the official scorer, and conversations from made parquet files through formats with and without a template."""

import json
import random
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from eval.benchmarks import SUITES, mrcr
from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.metrics import score_example
from eval.benchmarks.mrcr import SUITE, MrcrConfig, load
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import DataSettings, check_lengths
from eval.run.settings import DataConfig
from lazyllm.errors import UserError
from lazyllm.models.load import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.helpers import tiny
from tests.runs import measure, small_run

ASK = "Write a poem about tapirs."
TALK = [ASK, "A tapir ran.", ASK, "It slept.", "Prepend xY9 to the 2nd."]


def grade(response: str, answer: str, random_string_to_prepend: str) -> float:
    """The function of the dataset's card (openai/mrcr, MIT)."""
    if not response.startswith(random_string_to_prepend):
        return 0
    response = response.removeprefix(random_string_to_prepend)
    answer = answer.removeprefix(random_string_to_prepend)
    return float(SequenceMatcher(None, response, answer).ratio())


def row(talk: list[str] = TALK, needles: int = 2, **changes: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[place % 2], "content": said} for place, said in enumerate(talk)]
    made = {"prompt": json.dumps(messages), "answer": "xY9It slept.", "random_string_to_prepend": "xY9"}
    return made | {"n_needles": needles, "n_chars": sum(map(len, talk))} | changes


def write(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "2needle").mkdir(exist_ok=True)
    pd.DataFrame(rows).to_parquet(folder / "2needle" / "2needle_0.parquet")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """(rows of a file, settings) -> the settings to load them, with tokens counted as words."""

    def made(*rows: dict[str, Any], lengths: tuple[int, ...] = (8192,), **more: Any) -> DataSettings:
        write(tmp_path, *rows)
        return DataSettings(tmp_path, options=MrcrConfig(list(lengths)), **more)

    monkeypatch.setattr(mrcr, "_counter", lambda settings: ("words", lambda text: len(text.split())))
    return made


def long(words: int, **changes: Any) -> dict[str, Any]:
    return row([*TALK[:-1], " ".join(["word"] * words)], **changes)


def test_score_is_the_datasets_own() -> None:
    rng, dataset, gold = random.Random(0), SUITE.datasets[0], "xY9It slept all day, and dreamt."
    answers = ["", "xY9", gold, " " + gold, gold.lower(), gold[3:], "xY9xY9It slept", "xY9" + gold[:2:-1]]
    answers += ["xY9" + "".join(rng.choices("Itslept, day", k=rng.randint(0, 300))) for _ in range(50)]
    for answer in answers:
        assert score_example(dataset, answer, (gold, "xY9")) == grade(answer, gold, "xY9")
    assert score_example(dataset, gold, (gold, "xY9")) == 1


def test_rows_are_chosen_by_needles_and_bins(settings) -> None:
    sizes = (4079, 4080, 8175, 8176, 16_367)  # and 17 words of the other messages and the answer
    given = settings(*(long(size) for size in sizes), long(5000, needles=4), lengths=(8192, 16_384))
    two, four, _ = SUITE.datasets
    assert [(one.length, one.groups) for one in load(two, given).examples] == [
        (4097, ("length=8192",)), (8192, ("length=8192",)), (8193, ("length=16384",)), (16_384, ("length=16384",))
    ]  # fmt: skip
    assert [one.official for one in load(four, given).examples] == [long(5000, needles=4)]
    assert load(two, given).source.endswith("tokens by words")
    assert [one.length for one in load(two, settings(*map(long, sizes))).examples] == [4097, 8192]
    loaded = [load(two, settings(long(40_000), long(5000), lengths=bins)) for bins in ((8192,), (8192, 65_536))]
    assert len({one.examples[-1].id for one in loaded}) == 1  # tables join runs of several lengths by id
    with pytest.raises(UserError, match=r"tokens by words: no usable row; give other mrcr\.lengths than \[16384\]"):
        load(two, settings(long(5000), lengths=(16_384,)))


def test_tokens_are_counted_by_the_model_without_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(mrcr, "importlib", SimpleNamespace(import_module=missing))
    name, count = mrcr._counter(DataSettings(model=ModelSpec("tiny")))
    assert (name, count("1 2 3")) == ("the model's tokenizer", len(tiny()[1].encode("1 2 3", add_special_tokens=False)))


def test_messages_enter_the_template_as_they_are(settings) -> None:
    (example,) = load(SUITE.datasets[0], settings(long(5000))).examples
    tokenizer: Any = load_tokenizer_of(ModelSpec("tiny"))
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    talk = [*TALK[:-1], example.input]
    roles = ["user", "assistant", "user", "assistant", "user"]
    expected = "".join(f"<{role}>{said}" for role, said in zip(roles, talk, strict=True)) + "<assistant>"
    built = build_prompt(example, SUITE.datasets[0], tokenizer, chat=CHAT_FORMATS["auto"])
    assert built.text == expected
    assert built.tokens_before_truncation == len(built.token_ids)
    plain = build_prompt(example, SUITE.datasets[0], tokenizer, chat=CHAT_FORMATS["llama2"])
    assert [start == end for start, end in plain.context] == [True]  # known, and empty
    eos, bos = tokenizer.eos_token or "", tokenizer.bos_token or ""
    turns = [f"[INST]{asked}[/INST]{answer}{eos}{bos}" for asked, answer in zip(talk[::2], talk[1::2], strict=False)]
    assert plain.text == "".join(turns) + f"[INST]{talk[-1]}[/INST]"


def test_run_from_a_folder_scores_and_stores(settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "mrcr", replace(SUITE, check=partial(check_lengths, (64,))))
    folder = settings(long(30), long(31)).dir
    visits = measure(
        small_run(tmp_path / "run", dataset={"mrcr_2": True}, data=DataConfig(dir=str(folder)), mrcr=MrcrConfig([64]))
    ).visits
    assert [(one.dataset, one.groups, one.turns[0].answers) for one in visits] == [
        ("mrcr_2", ["length=64"], ["xY9It slept.", "xY9"])
    ] * 2
    assert visits[0].turns[0].end == "".join([*TALK[:-1], " ".join(["word"] * 30)])
