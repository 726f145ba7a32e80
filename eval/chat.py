"""Talk to a model, or ask it about a long file.

    lazyllm-bench chat model=llama2 method=lazy 'method.schedule={9: 0.5, 19: 0.5}' --prompt-file report.txt
    lazyllm-bench chat model.name=FILE.gguf max_new_tokens=50 --once "What is the capital of France?"

The arguments are those of lazyllm-bench run; those of datasets and prompts have no effect. Answers are greedy, of 256
tokens or `max_new_tokens` at most, and go to standard output, their cost to standard error: TTFT, the share of all
turns' prompt tokens that was computed (mean over layers), and the earlier tokens that this turn revived (in the layer
with the most). With a chat template, a turn runs only what the template writes after the last answer, without thoughts
and with a fixed date. Without one, each line is a prompt of its own. Ctrl-C stops an answer, Ctrl-D ends.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from eval.run.asked import ask
from eval.run.config import run_config
from eval.run.local import LocalModel
from lazyllm.errors import UserError, parser_of, reason_of
from lazyllm.integrations.chat import Chat, check_text
from lazyllm.models.checkpoint import read_config

MAX_NEW_TOKENS = 256


def main(arguments: Sequence[str]) -> None:
    """The command `chat`. Raises UserError, before torch is imported if it can."""
    parser = parser_of("chat", __doc__)
    parser.add_argument("run", nargs="*", metavar="KEY=VALUE", help="as of lazyllm-bench run; default: model=tiny")
    parser.add_argument("--prompt-file", type=Path, help="text before the (first) question, UTF-8")
    parser.add_argument("--once", metavar="TEXT", help="answer TEXT and end; - reads it from standard input")
    options = parser.parse_intermixed_args(arguments)
    # the dataset, which none is needed for, is one that is here
    asked = ask(run_config(["dataset=lookup", "baseline=false", *options.run]))
    subject = asked.subject
    if not isinstance(subject, LocalModel) or len(asked.arms) > 1:
        raise UserError("chat takes a model of this process, model=NAME, and one method, method=NAME")
    try:
        context = "" if options.prompt_file is None else _text_of(options.prompt_file) + "\n"
        check_text(options.once or "")
        read_config(subject.spec)
        (arm,) = subject.arms(asked.datasets, asked.suite.length(asked.data), None)
        method = arm.method(asked.datasets[0].name)

        from lazyllm.models.load import load_weights  # not at the top: it imports torch

        method.check(subject.model_config)
        tokenizer = subject.tokenizer  # refused, if it is another model's, before the weights are read
        chat = Chat(load_weights(subject.spec), tokenizer, method, asked.config.max_new_tokens or MAX_NEW_TOKENS)
        if options.once is not None:
            chat.answer(context + (sys.stdin.read() if options.once == "-" else options.once))
            return
    except (OSError, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    print(f"{subject.spec.name}, {chat.method}. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            if text := input("> " if sys.stdin.isatty() else "").strip():
                chat.answer(text if chat.messages else context + text)
        except EOFError:
            return
        except (ValueError, RuntimeError) as error:  # a text that is too long, or no memory: the next may be shorter
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(stopped)", file=sys.stderr)


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--prompt-file {file}: cannot be read as UTF-8 text ({reason_of(error)})") from error
