"""`lazyllm-bench chat`: its output, and how it ends. Answers are compared with `lazyllm.generate`."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import lazyllm
from lazyllm.errors import UserError
from lazyllm.integrations.chat import Chat, main, method_of
from lazyllm.methods import Baseline, Lazy, RandomDrop

TEXT = "entry zanur lantern copper. the old house was quiet. Question: entry zanur"
METHOD = Lazy({2: 0.5, 5: 0.5})
GREEDY = {"do_sample": False, "max_new_tokens": 6}
TEMPLATE = "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}\n{% endfor %}assistant:"
BARE = "{% for message in messages %}{{ message['content'] }}{{ END if message['role'] == 'assistant' }}{% endfor %}"
SUMMARY = re.compile(
    r"\[TTFT (\d+\.\d{3}) s \| (\d+\.\d) % of (\d+) prompt tokens computed, \d+ revived \| (\d+) tokens in \S+ s\]"
)
SMALL = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "6"]


def generated(tiny: tuple[Any, Any], text: str, method: Any = METHOD) -> tuple[lazyllm.Generation, str]:
    model, tokenizer = tiny
    out = lazyllm.generate(model, tokenizer(text).input_ids, method, 6)
    return out, tokenizer.decode(out.token_ids, skip_special_tokens=True)


def test_once(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("entry zanur lantern copper. the old house was quiet.")
    arguments = ["--once", "-", "--prompt-file", str(tmp_path / "long.txt"), "--schedule", "{2: 0.5, 5: 0.5}"]
    command = [sys.executable, "-m", "lazyllm.integrations.chat", *SMALL, "--threads", "1", *arguments]
    done = subprocess.run(command, input="Question: entry zanur", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected, text = generated(tiny, "entry zanur lantern copper. the old house was quiet.\nQuestion: entry zanur")
    assert done.stdout == text + "\n"
    found = SUMMARY.search(done.stderr)
    assert found
    assert found[2] == f"{expected.pct_prompt_tokens_computed:.1f}"
    assert [int(found[3]), int(found[4])] == [expected.prompt_tokens, len(expected.token_ids)]
    assert float(found[1]) > 0


def test_lines_from_standard_input(tiny, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a chat template each line is a prompt; a line that is too long is refused, and the next one is read."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TEXT}\n\n{'lantern ' * 4200}\n{TEXT}\n"))
    main([*SMALL, "--schedule", "none"])
    printed = capsys.readouterr()
    assert printed.out == 2 * (generated(tiny, TEXT, Baseline())[1] + "\n")
    assert [found[1] for found in SUMMARY.findall(printed.err)] == ["100.0", "100.0"]
    assert "exceed the model's 4096" in printed.err


@pytest.mark.parametrize("ends", [True, False])
def test_a_turn_runs_only_what_is_new(tiny, ends: bool, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Also after an end token, if the template has one."""
    model, tokenizer = tiny
    end = tokenizer.eos_token if ends else "\n"
    monkeypatch.setattr(tokenizer, "chat_template", BARE.replace("END", repr(end)))
    new = 30 if ends else 2
    talk = Chat(model, tokenizer, METHOD, "", GREEDY | {"max_new_tokens": new})
    rows: list[int] = []
    with model.get_input_embeddings().register_forward_hook(lambda *args: rows.append(args[2].shape[-2])):
        first = talk.answer(TEXT)
        assert (first.token_ids[-1] == tokenizer.eos_token_id) == ends
        rows.clear()
        second = talk.answer("entry lantern")
    answer = tokenizer.decode(first.token_ids, skip_special_tokens=True)
    ids = tokenizer(f"{TEXT}{answer}{end}entry lantern", add_special_tokens=False).input_ids
    session = lazyllm.start(model, tokenizer(TEXT, add_special_tokens=False).input_ids, METHOD)
    session.answer(None, new)
    assert ids[: session.num_tokens] == session.token_ids
    more = ids[session.num_tokens :]
    assert rows[0] == len(more) + 1
    expected = session.answer(more, new)
    assert (second.token_ids, second.selected) == (expected.token_ids, expected.selected)
    share = f"{expected.pct_prompt_tokens_computed:.1f} % of {expected.prompt_tokens} prompt tokens computed"
    printed = capsys.readouterr().err
    assert f"{share}, {expected.revived.max()} revived" in printed
    assert "again" not in printed


THINKS = (
    "{{ 'Today: ' + strftime_now('%d %b %Y') }}\n{% for message in messages %}{{ message['role'] }}:"
    "{{ message['content'].split('</think>')[-1] }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


def test_thoughts_are_off_and_dropped_and_the_date_is_fixed(tiny, capsys, monkeypatch) -> None:
    """The session goes on behind the answer, although the template writes no empty thought before earlier answers."""
    model, tokenizer = tiny
    monkeypatch.setattr(tokenizer, "chat_template", THINKS)
    talk = Chat(model, tokenizer, METHOD, "", GREEDY)
    first, second = talk.answer("entry zanur"), talk.answer("entry lantern")
    assert "again" not in capsys.readouterr().err
    prompt = "Today: 26 Jul 2024\nuser:entry zanur\nassistant:<think></think>"
    with lazyllm.start(model, tokenizer(prompt, add_special_tokens=False).input_ids, METHOD) as session:
        assert first.token_ids == session.answer(None, 6).token_ids
        later = "\nuser:entry lantern\nassistant:<think></think>"
        expected = session.answer(tokenizer(later, add_special_tokens=False).input_ids, 6)
    assert (second.token_ids, second.prompt_tokens) == (expected.token_ids, expected.prompt_tokens)


def test_a_template_that_leaves_earlier_answers_out_is_read_again(
    tiny: tuple[Any, Any], capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    model, tokenizer = tiny
    template = TEMPLATE.replace("in messages", "in messages if message['role'] == 'user'")
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages | length }} " + template)
    talk = Chat(model, tokenizer, METHOD, "the old house was quiet.", GREEDY)
    first = talk.answer("entry zanur")
    second = talk.answer("entry lantern")
    answers = [tokenizer.decode(found.token_ids, skip_special_tokens=True) for found in (first, second)]
    printed = capsys.readouterr()
    assert printed.out == "".join(f"{answer}\n" for answer in answers)
    assert printed.err.count("[reads the whole conversation again: the chat template leaves earlier answers out]") == 1
    begin = "user:the old house was quiet.\nentry zanur\n"
    for found, text in ((first, f"1 {begin}"), (second, f"3 {begin}user:entry lantern\n")):
        ids = tokenizer(f"{text}assistant:", add_special_tokens=False).input_ids
        expected = lazyllm.generate(model, ids, METHOD, 6)
        assert (found.prompt_tokens, found.token_ids) == (len(ids), expected.token_ids)
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "user", "assistant"]


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_stops_an_answer_and_a_second_one_gives_it_up(tiny: tuple[Any, Any], presses: int) -> None:
    model, tokenizer = tiny
    handler, calls = signal.getsignal(signal.SIGINT), []

    def press(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(ids.shape[1])
        if len(calls) == 3:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return scores

    options = GREEDY | {"min_new_tokens": 6, "logits_processor": LogitsProcessorList([press])}
    talk = Chat(model, tokenizer, METHOD, "", options)
    if presses == 1:
        assert len(talk.answer(TEXT).token_ids) == 3
        assert len(talk.messages) == 2
    else:
        with pytest.raises(KeyboardInterrupt):
            talk.answer(TEXT)
        assert talk.messages == []
    assert signal.getsignal(signal.SIGINT) is handler
    assert "generate" not in vars(model)
    assert model.config._attn_implementation == "sdpa"
    assert len(talk.answer(TEXT).token_ids) == 6  # the next answer is not stopped


def test_sampling_follows_the_seed(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    options = {"do_sample": True, "temperature": 3.0, "top_p": 0.9, "top_k": 0, "max_new_tokens": 6}
    torch.manual_seed(4)
    found = Chat(model, tokenizer, Baseline(), "", options).answer(TEXT).token_ids
    torch.manual_seed(4)
    inputs = tokenizer(TEXT, return_tensors="pt")
    assert found == model.generate(**inputs, **options)[0, inputs.input_ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "{9: 0.5}"], "only 8 layers"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0: give 1 or more"),
        (["--temperature", "-1"], "--temperature -1.0: give 0"),
        (["--top-p", "0.5"], "set --temperature too"),
        (["--temperature", "1", "--top-p", "0"], r"a top-p in \(0, 1\]"),
        (["--dtype", "int8"], "unknown dtype"),
        (["--device", "warp"], "unknown device"),
        (["--prompt-file", "no/such/file"], "No such file"),
    ],
)
def test_errors_come_before_the_model(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyllm.models.load.load_weights", None)  # it would be a TypeError of another text
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        main(["--once", "x", *arguments])


def test_schedules_and_methods() -> None:
    assert method_of("none", None) == method_of("paper", "baseline") == Baseline()
    assert method_of("paper", None) == Lazy()
    for schedule in ("{50%: 0.7, 5: 0.5}", '{"50%": 0.7, "5": 0.5}', "50%:0.7+5:0.5"):
        assert method_of(schedule, None).tokens_per_layer(8, 100) == [100] * 4 + [70] + [35] * 3
    for settings in ("{keep: 0.5}", '{"keep": 0.5}'):
        assert method_of("paper", f"random_drop {settings}") == RandomDrop(0.5)
    assert method_of("paper", "lazy {schedule: {2: 0.5}}") == Lazy({2: 0.5})
    with pytest.raises(UserError, match="unknown method 'nosuch'; known are"):
        method_of("paper", "nosuch")
    for wrong in ("0.5", "keep=0.5", "{keep: 0.5"):
        with pytest.raises(UserError, match=f"--method random_drop {wrong}: expected a NAME, or a NAME and settings"):
            method_of("paper", f"random_drop {wrong}")


def test_the_packages_example(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of `help(lazyllm)` and the README runs unchanged, and finds the answer in its prompt."""
    assert lazyllm.__doc__ is not None
    blocks = lazyllm.__doc__.split("\n\n", 1)[1]
    exec(compile(textwrap.dedent(blocks), "lazyllm.__doc__", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.split("Question: entry zanur")[1].strip() == "lantern copper."
