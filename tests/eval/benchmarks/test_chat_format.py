"""Current chat templates: arguments, system prompts, dates, thoughts; and the cleaning of answers.

The templates are our own small ones; each works like those of the named models.
"""

import time
from datetime import date
from typing import Any

import pytest
from jinja2 import Environment

from eval.benchmarks import SUITES
from eval.benchmarks.chat_format import CHAT_FORMATS, chat_format, post_process
from eval.compose import read
from eval.run.check import chat_of
from lazyllm.errors import UserError
from lazyllm.models.tokenizers import load_tokenizer_of
from lazyllm.spec import ModelSpec
from tests.eval.benchmarks.loading import prompt_of
from tests.eval.benchmarks.test_prompts import QUESTION

TURNS = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}<|end|>{% endfor %}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
TEMPLATES = {
    "llama3.1": "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}"
    "{% endif %}<|system|>Today: {{ date_string }}" + TURNS + ASK,
    "llama3.2": "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}"
    "{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}"
    "<|system|>Today: {{ date_string }}" + TURNS + ASK,
    "granite": "<|system|>Today's Date: {{ strftime_now('%B %d, %Y') }}." + TURNS + ASK,
    "qwen3": TURNS + ASK + "{% if add_generation_prompt and enable_thinking is defined "
    "and enable_thinking is false %}<think></think>{% endif %}",
    "smollm3": "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "{% set today = strftime_now('%d %B %Y') %}<|system|>Today Date: {{ today }}, "
    "{{ '/think' if enable_thinking else '/no_think' }}" + TURNS + ASK,
    "gemma": "{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + TURNS + ASK,
    "mistral": "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
    "[INST] {{ m['content'] }}[/INST]{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}",
    "qwen2.5": "{% if messages[0]['role'] != 'system' %}<im>system\nYou help.</im>\n{% endif %}"
    "{% for m in messages %}{{ '<im>' + m['role'] + '\n' + m['content'] + '</im>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<im>assistant\n' }}{% endif %}",
}  # fmt: skip
READ_THE_CLOCK = {"llama3.1", "llama3.2", "granite", "smollm3"}  # or are told the date


def tokenizer_with(template: str | None) -> Any:
    tokenizer: Any = load_tokenizer_of(ModelSpec("tiny"))
    tokenizer.chat_template = TEMPLATES.get(template or "", template)
    return tokenizer


def text_of(template: str, **settings: Any) -> str:
    chat = chat_format("auto", **settings)
    return prompt_of(QUESTION, tokenizer_with(template), chat=chat).text


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompt_is_the_templates_own_text_without_thoughts_and_with_its_date(
    template: str,
) -> None:
    tokenizer = tokenizer_with(template)
    given: dict[str, Any] = {"enable_thinking": False, "date_string": "26 Jul 2024"}
    given |= {"strftime_now": date(2024, 7, 26).strftime}
    given |= {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    expected = Environment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATES[template])
    messages = [{"role": "user", "content": "Who?"}]
    text = expected.render(messages=messages, add_generation_prompt=True, **given)
    assert text_of(template) == text


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompt_is_the_same_on_another_day(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    today, reads_clock = text_of(template), template in READ_THE_CLOCK
    monkeypatch.setattr(time, "time", lambda: 2e9)
    # whoever asks it for now() fails
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", None)
    assert text_of(template) == today
    assert chat_format("auto").reads_clock(tokenizer_with(template)) == reads_clock
    assert (text_of(template, today="2025-12-31") != today) == reads_clock


@pytest.mark.parametrize(
    ("preset", "expected"), [("llama2", False), ("llama2-base", False), ("qwen3-8b", True)]
)
def test_presets_use_the_tokenizers_template_but_for_longbenchs_models(
    preset: str, expected: bool
) -> None:
    config = read([f"model={preset}"])
    assert chat_of(config, SUITES["longbench"]).from_tokenizer == expected


def test_repr_of_a_format_is_the_one_in_hashes_of_rows() -> None:
    """The hash of needle rows includes the chat format's `repr`, which stored runs contain."""
    assert repr(CHAT_FORMATS["llama2"]) == (
        "ChatFormat(before='[INST]', after='[/INST]', from_tokenizer=False, or_none=False, "
        "args={}, system=None, today='2024-07-26', thinking_tokens=0, strip=False, delete='')"
    )


def test_date_can_be_set_and_thinking_is_off_unless_it_is_given_tokens() -> None:
    assert "Today Date: 31 December 2025," in text_of("smollm3", today="2025-12-31")
    assert "Today: 1 May 1990" in text_of("llama3.2", args={"date_string": "1 May 1990"})
    assert text_of("qwen3").endswith("<|assistant|><think></think>")
    assert text_of("qwen3", thinking_tokens=100).endswith("<|assistant|>")
    assert text_of("qwen3", args={"enable_thinking": True}).endswith("<|assistant|>")
    assert "/no_think" in text_of("smollm3")
    assert "/think" in text_of("smollm3", thinking_tokens=100)
    assert chat_format("auto").template_args(tokenizer_with("llama3.2")) == {}


def test_system_prompt_comes_first() -> None:
    text = text_of("qwen3", system="Be brief.")
    assert text.startswith("<|system|>Be brief.<|end|><|user|>Who?")
    reason = r"refuses the messages \(System role not supported\): see model.system"
    with pytest.raises(UserError, match=reason):
        text_of("gemma", system="Be brief.")


def test_null_format_is_the_tokenizers_template_or_none() -> None:
    chat, bare, templated = chat_format(None), tokenizer_with(None), tokenizer_with("qwen3")
    assert prompt_of(QUESTION, bare, chat=chat) == prompt_of(QUESTION, bare)
    auto = prompt_of(QUESTION, templated, chat=chat_format("auto"))
    assert prompt_of(QUESTION, templated, chat=chat) == auto


@pytest.mark.parametrize(
    ("chat", "text", "expected"),
    [
        ("xgen", " Assistant: a cat \n", " a cat"),  # stripped first, then the name is deleted
        ("xgen", "a Assistant: b Assistant:", "a  b "),
        ("llama2", " Assistant: a cat \n", " Assistant: a cat \n"),
        ("none", "\n a\n", "\n a\n"),
        ("auto", "\n a</think>\n", "\n a</think>\n"),
        ("thinking", "<think>Is it 3? No.</think>\n\n4", "4"),
        ("thinking", "Is it 3? No.</think> 3 </think> 4 ", "4 "),
        ("thinking", "Is it 3? No, 4", ""),  # it had not finished
    ],
)
def test_answers_are_cleaned_by_format(chat: str, text: str, expected: str) -> None:
    thinking = chat_format("auto", thinking_tokens=100)
    form = thinking if chat == "thinking" else CHAT_FORMATS[chat]
    assert post_process(text, form) == expected
    assert post_process("4", thinking, chat_wrap=False) == "4"  # it was not told to think


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("vicuna", {}, "unknown chat format 'vicuna'; known are none, llama2, xgen, auto"),
        ("llama2", {"system": "Be brief."}, "model.system is for the tokenizer's chat template"),
        ("none", {"args": {"a": 1}}, "model.chat_args is for the tokenizer's chat template"),
        ("auto", {"today": "tomorrow"}, "model.today=tomorrow: expected a date, YYYY-MM-DD"),
    ],
)
def test_bad_settings_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chat_format(name, **settings)
