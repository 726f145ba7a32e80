"""SCBench: prompts and scores against the official code's steps, made folders in the official format, and runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval.benchmarks import scbench
from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import CHOICES, DATASETS
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.scbench import SUITE, TASKS, prompts_sha256
from eval.benchmarks.suite import DataSettings
from eval.store.folder import read_visits
from lazyllm.errors import UserError
from tests.eval.benchmarks.test_prompts import Characters
from tests.runs import measure, run_of

# Our own prompts with the official placeholders: SCBench's must not enter the repository
OPTIONS = "A) {OPTION_A} B) {OPTION_B} C) {OPTION_C} D) {OPTION_D}"
FIRST = dict.fromkeys(TASKS, "Text {{}}:\n{context}\n{input}") | {
    "scbench_choice_eng": f"Book:\n{{context}}\n{{question}} {OPTIONS} =",
    "scbench_qa_eng": "Novel:\n{context}\n? {question}\nSay",
    "scbench_mf": "{prefix}\n{context}\n{input}",
}
PLAIN = dict.fromkeys(TASKS, "{pre_ans}\n\nNext {input}") | {
    "scbench_choice_eng": f"{{pre_ans}}\n\n{{question}} {OPTIONS} ->",
    "scbench_mf": "{pre_ans}\n\n{prefix}\n{input}",
}
CHAT = dict.fromkeys(TASKS, "Chat {input}") | {
    "scbench_choice_eng": f"{{question}} {OPTIONS} =",
    "scbench_mf": "{prefix}\n{input}",
}
PROMPTS = "import torch\nrows = [1]\n" + "".join(
    f"{name} = {prompts!r}\n" for name, prompts in zip(scbench._NAMES, (FIRST, PLAIN, CHAT), strict=True)
)
ANSWERS: dict[str, list[Any]] = {
    "scbench_kv": ["a-1", "b-2", "c-3"],
    "scbench_prefix_suffix": ["abxyz", "cdxyz", "efxyz"],
    "scbench_vt": [["AAA", "BBB"], ["CCC"], ["DDD", "EEE"]],
    "scbench_qa_eng": ["Ann", "Bob", "Carl"],
    "scbench_qa_chn": ["安娜", "鲍勃", "卡尔"],
    "scbench_choice_eng": ["a fox", "a cow", "a dog"],
    "scbench_many_shot": ["(B)", "(A)", "(C)"],
    "scbench_mf": [7, 3, 5],
    "scbench_summary": ["One went.", "Two went.", "Three went."],
    "scbench_summary_with_needles": ["One went.", "4711", "Three went."],
}
SIGHTS = ["a dog", "a cow", "a fox", "a bee"]


def row(task: str, number: int = 0, **changes: Any) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for place, answer in enumerate(ANSWERS[task]):
        turns.append({"input": f"The number {number + place} is", "answer": answer})
        if task == "scbench_choice_eng":
            turns[-1]["options"] = SIGHTS
        if task == "scbench_summary_with_needles":
            turns[-1]["task"] = "scbench_passkey" if answer == "4711" else "scbench_summary"
    context: Any = [3, 5, 7] * 40 if task == "scbench_mf" else f"{number} {{a}} a-1 abxyz b-2; a-1 " + "word " * 60
    return {"id": number, "context": context, "multi_turns": turns} | changes


def write(folder: Path, task: str, *rows: Any) -> Path:
    (folder / "eval_utils.py").write_text(PROMPTS)
    lines = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in rows)
    (folder / f"{task}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture(autouse=True)
def _own_prompts(monkeypatch):
    monkeypatch.setattr(scbench, "PROMPTS_SHA256", prompts_sha256(PROMPTS.encode()))


def load(folder: Path, task: str, **settings: Any):
    return SUITE.load(DATASETS[task], DataSettings(dir=folder, **settings))


def official_prompts(task: str, values: dict[str, Any], later: dict[str, str]) -> list[str]:
    """`create_multiturn_prompt`: each turn's template with the fields that it names, no gold answer in front."""
    prompts = []
    for place, turn in enumerate(values["multi_turns"]):
        fields = {"context": values["context"], "input": turn["input"], "question": turn["input"], "pre_ans": ""}
        fields |= {f"OPTION_{letter}": sight for letter, sight in zip("ABCD", SIGHTS, strict=True)}
        fields["prefix"] = f"What is {re.findall('The .+ is', turn['input'])[0].lower()[:-3]}?"
        prompts.append((later if place else FIRST)[task].format(**fields))
    return prompts


@pytest.mark.parametrize("chat", ["none", "llama2"])
@pytest.mark.parametrize("task", TASKS)
def test_prompts_are_official(task, chat, tmp_path):
    values = [row(task), row(task, 1)]
    renamed = {"input" if key == "context" else key: value for key, value in values[1].items()}  # some files say so
    loaded = load(write(tmp_path, task, values[0], renamed), task, chat=CHAT_FORMATS[chat])
    assert loaded.max_new_tokens == TASKS[task][2]
    tokenizer: Any = Characters()
    for example, value in zip(loaded.examples, values, strict=True):
        first, *later = official_prompts(task, value, PLAIN if chat == "none" else CHAT)
        prompt = build_prompt(example, loaded.dataset, tokenizer)
        assert prompt.text == first
        assert [prompt.text[start:end] for start, end in prompt.context] == [str(value["context"])]
        assert [turn.text for turn in example.turns] == later
        official_prefix = "This paper" if (task, chat) == ("scbench_summary", "llama2") else ""
        assert {turn.answer_prefix for turn in example.turns} == {official_prefix}
        assert example.answer_prefix == ""


def test_evidence_holds_every_place_of_the_gold_value(tmp_path):
    (example,) = load(write(tmp_path, "scbench_kv", row("scbench_kv")), "scbench_kv").examples
    spans = [example.evidence, *(turn.evidence for turn in example.turns)]
    assert [[example.context[start:end] for start, end in turn] for turn in spans] == [["a-1", "a-1"], ["b-2"], []]


def test_malformed_prompts_are_refused(tmp_path):
    write(tmp_path, "scbench_kv", row("scbench_kv"))
    file = tmp_path / "eval_utils.py"
    for content in ("x = 1", PROMPTS.replace("{prefix}", "{who}"), PROMPTS.replace("{context}", ""), "def"):
        file.write_text(content)
        with pytest.raises(UserError, match=r"holds no prompts of SCBench's .* expected scbench/eval_utils\.py"):
            load(tmp_path, "scbench_kv")


def test_task_without_rows_or_scorer_is_left_out_of_the_suite_and_refused_by_name(tmp_path):
    folder = write(tmp_path, "scbench_kv", row("scbench_kv"))
    why = {dataset.name: SUITE.check(dataset, DataSettings(dir=folder)) for dataset in CHOICES["scbench"]}
    assert [name for name, reason in why.items() if reason is None] == ["scbench_kv"]
    assert len(why) == 12
    with pytest.raises(UserError, match=r"scbench_repoqa: its official score needs a parser of six languages"):
        run_of("dataset=scbench_repoqa", f"data.dir={folder}")
    with pytest.raises(UserError, match=r"scbench_vt: data\.dir=.* holds no <task>\.jsonl for it"):
        run_of("dataset=scbench_vt", f"data.dir={folder}")


def test_run_takes_the_tasks_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for task in ("scbench_kv", "scbench_mf"):
        folder = write(tmp_path, task, row(task), row(task, 1))
    settings = [f"data.dir={folder}", "model.max_prompt_tokens=101", "max_new_tokens=2", "warmup=0"]
    measure(run_of("dataset=scbench", "out=one", *settings))
    visits = read_visits(Path("one"))
    assert [visit.id for visit in visits] == [f"{task}-{n}" for task in ("scbench_kv", "scbench_mf") for n in (0, 1)]
    for visit in visits:
        assert [turn.answers for turn in visit.turns] == [[str(answer)] for answer in ANSWERS[visit.dataset]]
        assert all(len(answers) == len(visit.turns) for answers in visit.answers.values())
