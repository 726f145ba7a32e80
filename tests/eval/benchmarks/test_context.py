"""The part of a prompt that may be shortened: on whole real prompts, letter by letter, and in small cases by hand."""

import re
from dataclasses import replace
from typing import Any

import pytest

from eval.benchmarks.chat_format import CHAT_FORMATS
from eval.benchmarks.datasets import DATASETS, load_rows
from eval.benchmarks.embedded import TEMPLATES
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import Example
from lazyllm.methods import PromptCompression
from lazyllm.methods.prompt_compression import droppable
from lazyllm.models.tokenizers import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.eval import official
from tests.eval.benchmarks.test_prompts import QASPER, Characters, prompt_of
from tests.eval.official import LLAMA2, llama2


def letters_of_examples_answers(name: str, context: str) -> set[int]:
    """Places in a few-shot context that belong to an answer or a label, line by line."""
    places: set[int] = set()
    place, in_answer = 0, False
    for line in context.split("\n"):
        label = line.split(" ")[0]
        if name == "trec":
            in_answer = label == "Type:"
            places |= set(range(place, place + len("Question:")))
        elif name == "triviaqa":
            in_answer = line == "Question:" or (in_answer and line != "Passage:")
        elif name == "samsum":
            in_answer = label == "Summary:" or (in_answer and label != "Dialogue:")
        if label in ("Dialogue:", "Passage:"):
            places |= set(range(place, place + len(label)))
        if in_answer:
            places |= set(range(place, place + len(line) + 1))
        place += len(line) + 1
    return places if name in ("trec", "triviaqa", "samsum") else set()


@official.needs(official.LONGBENCH)
@pytest.mark.parametrize(("name", "label"), [("trec", "Question:"), ("triviaqa", "Passage:"), ("samsum", "Dialogue:")])
def test_context_of_a_real_few_shot_row_holds_no_answer(name: str, label: str) -> None:
    """One answer per `Question:`, `Passage:` or `Dialogue:` line; contexts are whole, so no line is cut."""
    tokenizer: Any = Characters()
    for row in load_rows(DATASETS[name], official.LONGBENCH).examples:
        prompt = build_prompt(replace(row, instruction="", input=""), DATASETS[name], tokenizer)
        context = {place for span in prompt.context for place in range(*span)}
        answers = letters_of_examples_answers(name, row.context)
        assert {place for place in context & answers if prompt.text[place] != "\n"} == set() != answers
        # Each example's text is between its label and its answer, so there is one range per example
        texts = [span for span in prompt.context if prompt.text[slice(*span)].strip()]
        assert len(texts) == sum(line.startswith(label) for line in row.context.split("\n"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_words_of_an_embedded_rows_context_may_go(name: str) -> None:
    tokenizer: Any = load_tokenizer_of(ModelSpec("tiny"))
    for example in load_rows(DATASETS[name]).examples[:6]:
        prompt = build_prompt(example, DATASETS[name], tokenizer)
        assert prompt.spans is not None
        gone = droppable(prompt.as_input()).tolist()
        left = "".join(prompt.text[slice(*span)] for i, span in enumerate(prompt.spans.tolist()) if i not in gone)
        head, tail = TEMPLATES[name].format(context="\0", input=example.official["input"]).split("\0")
        assert left.startswith(head)
        assert left.endswith(tail)
        assert left.count("\n") == prompt.text.count("\n")
        assert len(gone) > len(prompt.token_ids) / 2
        if name == "shots":
            examples = example.context.split("\n")
            assert left == head + "\n".join(f"Example {line.split(' ')[-1]}" for line in examples) + tail
        if name == "complete":  # the first word of an indented line holds part of its indentation
            first_words = re.compile(r"^  \w*", re.MULTILINE)
            assert first_words.findall(left) == first_words.findall(prompt.text)
            assert max(len(line.split()) for line in left.split("\n")[1:-1]) == 1


ROW = Example("qasper", "one", "|Who?", "0123456789", ("cat",), instruction="Q: ")  # 3 + 10 + 5 characters


def context_of(row: Example = ROW, tokenizer: Any = None, **settings: Any) -> list[str]:
    prompt = prompt_of(row, tokenizer, **settings)
    return [prompt.text[slice(*span)] for span in prompt.context]


@pytest.mark.parametrize(
    ("limit", "context"),
    [
        (None, ["0123456789"]),
        (19, ["0123456789"]),
        (18, ["01234" + "6789"]),  # nine tokens of each end, BOS among the first: one range, with the cut in it
        (12, ["01" + "9"]),
        (10, ["0"]),  # "Q: 0" and "|Who?"
        (8, []),  # "Q: " and "Who?"
        (6, []),  # "Q:" and "ho?": the cut reaches into both
    ],
)
def test_context_after_the_cut(limit: int | None, context: list[str]) -> None:
    for chat in ("none", "llama2", "xgen"):
        assert context_of(max_prompt_tokens=limit, chat=CHAT_FORMATS[chat]) == context


def test_context_in_one_half_alone() -> None:
    row = replace(ROW, context="0123", input="|a very long question")
    assert context_of(row, max_prompt_tokens=20) == ["0123"]  # "Q: 0123|a" and "g question"
    row = replace(row, instruction="a very long instruction ", input="|Q")
    assert context_of(row, max_prompt_tokens=10) == ["123"]


def test_protected_text_splits_the_context_also_at_the_cut() -> None:
    row = replace(ROW, context="q: aa\nA: bb\nq: cc\nA: dd")
    settings: dict[str, Any] = dict(row=row, dataset=replace(QASPER, protected="^A:.*"))
    assert context_of(**settings) == ["q: aa\n", "\nq: cc\n"]
    # "Q: q: aa\nA: " is cut off "bb\n" - the pattern has seen the whole context before
    assert context_of(**settings, max_prompt_tokens=26) == ["q: aa\n", "cc\n"]
    assert prompt_of(**settings, max_prompt_tokens=26).text == "Q: q: aa\nA: " + "cc\nA: dd|Who?"[-13:]
    assert context_of(**settings, max_prompt_tokens=38) == ["q: aa\n", "\nq: cc\n"]  # cut in "bb"
    assert prompt_of(row).token_ids == prompt_of(**settings).token_ids


def test_context_is_found_in_the_tokenizers_chat_template() -> None:
    tokenizer = Characters()
    tokenizer.chat_template = "given"
    settings: dict[str, Any] = dict(tokenizer=tokenizer, chat=CHAT_FORMATS["auto"])
    assert context_of(**settings) == ["0123456789"]
    spaced = replace(ROW, instruction="", context=" 123 ", input="")  # the template strips
    assert context_of(spaced, **settings) == ["123"]
    assert context_of(**settings, dataset=DATASETS["lcc"]) == ["0123456789"]
    tokenizer.around = ("Q: 0123456789|Who? ", "")  # if it occurs twice, its place is unknown
    prompt = prompt_of(ROW, **settings)
    assert prompt.context == ()
    with pytest.raises(ValueError, match="chat template changes the prompt's text"):
        PromptCompression(0.5).check_prompt(prompt.as_input())


@official.needs(LLAMA2)
def test_character_at_the_cut_belongs_to_no_context() -> None:
    row = replace(ROW, instruction="Say: ", context="ha \U0001f602" * 30, input="\nWho?")  # four byte tokens each
    broken = 0
    for limit in range(60, 76):
        prompt = prompt_of(row, llama2(), max_prompt_tokens=limit)
        found = [prompt.text[slice(*span)] for span in prompt.context]
        assert "".join(found) == prompt.text[len("Say: ") : -len("\nWho?")].replace("\ufffd", "")
        broken += "\ufffd" in prompt.text
        assert (len(found) == 2) == ("\ufffd" in prompt.text)
        assert prompt.spans is not None
        goes = {prompt.text[slice(*prompt.spans[position])] for position in droppable(prompt.as_input())}
        assert "\U0001f602" in goes
        assert "\ufffd" not in goes
    assert 0 < broken < 16
