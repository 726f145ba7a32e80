"""`lazyllm-bench chat`: answers are compared with `lazyllm.generate` and with a session."""

import io
import sys

import pytest

import lazyllm
from eval.chat import main
from lazyllm.integrations.chat import Chat
from lazyllm.methods import Lazy
from tests.helpers import tiny

TEXT = "entry zanur lantern copper. the old house was quiet. Question: entry zanur"
METHOD = Lazy({2: 0.5, 5: 0.5})
SMALL = ["model=tiny", "model.device=cpu", "max_new_tokens=6"]
BARE = "{% for message in messages %}{{ message['content'] }}{{ END if message['role'] == 'assistant' }}{% endfor %}"
THINKS = (
    "{{ 'Today: ' + strftime_now('%d %b %Y') }}\n{% for message in messages %}{{ message['role'] }}:"
    "{{ message['content'].split('</think>')[-1] }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def test_chat_answers_each_line_and_goes_on_after_an_error(monkeypatch, capsys, tmp_path) -> None:
    (tmp_path / "long.txt").write_text("entry zanur lantern copper. the old house was quiet.")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"Question: entry zanur\n\n{'lantern ' * 4200}\nQuestion: entry\n"))
    main([*SMALL, "--prompt-file", str(tmp_path / "long.txt"), "method.schedule={2: 0.5, 5: 0.5}"])
    model, tokenizer = tiny()
    expected, shown = [], capsys.readouterr()
    for question in ("Question: entry zanur", "Question: entry"):
        ids = tokenizer(f"{(tmp_path / 'long.txt').read_text()}\n{question}").input_ids
        expected.append(lazyllm.generate(model, ids, METHOD, 6))
    texts = [tokenizer.decode(out.token_ids, skip_special_tokens=True) for out in expected]
    assert shown.out == "".join(f"{text}\n" for text in texts)
    for out in expected:
        assert f"{out.pct_prompt_tokens_computed:.1f} % of {out.prompt_tokens} prompt tokens computed" in shown.err
    assert "the model has 4096 positions" in shown.err


@pytest.mark.parametrize(
    ("template", "behind"), [(BARE, "ENDentry lantern"), (THINKS, "\nuser:entry lantern\nassistant:<think></think>")]
)
def test_chat_runs_only_what_the_template_writes_after_the_answer(template: str, behind: str, monkeypatch) -> None:
    """Without thoughts and with a fixed date, and no second end token after an answer that has ended."""
    model, tokenizer = tiny()
    end = tokenizer.eos_token
    monkeypatch.setattr(tokenizer, "chat_template", template.replace("END", repr(end)))
    talk = Chat(model, tokenizer, METHOD, 30)
    first, second = talk.answer(TEXT), talk.answer("entry lantern")
    prompt = TEXT if template == BARE else f"Today: 26 Jul 2024\nuser:{TEXT}\nassistant:<think></think>"
    with lazyllm.start(model, tokenizer(prompt, add_special_tokens=False).input_ids, METHOD) as session:
        assert session.answer(None, 30).token_ids == first.token_ids
        ended = first.token_ids[-1] == tokenizer.eos_token_id
        more = behind.replace("END", "" if ended else end)
        expected = session.answer(tokenizer(more, add_special_tokens=False).input_ids, 30)
    assert (second.token_ids, second.prompt_tokens) == (expected.token_ids, expected.prompt_tokens)
