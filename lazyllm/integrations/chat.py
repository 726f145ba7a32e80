"""Talk to a model, or ask it about a long file.

    lazyllm-bench chat --model llama2 --prompt-file report.txt --schedule '{9: 0.5, 19: 0.5}'
    lazyllm-bench chat --once "entry zanur lantern copper. Question: entry zanur" --max-new-tokens 8

Answers are greedy and go to standard output, their cost to standard error: TTFT, the share of all turns' prompt tokens
that was computed (mean over layers), and the earlier tokens that this turn revived (in the layer with the most). With a
chat template, a turn runs only what the template writes after the last answer, without thoughts and with a fixed date,
as in runs. Without one, each line is a prompt of its own. Ctrl-C stops an answer, Ctrl-D ends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lazyllm.errors import UserError, parser_of, reason_of
from lazyllm.methods import Method, make
from lazyllm.models.chat_template import render, text_between_answers, thinking_args, unseen_tokens
from lazyllm.spec import ModelSpec, source_of

if TYPE_CHECKING:
    from lazyllm.engine.generation import Conversation, Generation


@dataclass
class Chat:
    """A chat with a model.

    messages: the chat so far; empty without a chat template.
    conversation: the model's state after these messages; None if the next message needs a new prefill.
    """

    model: Any
    tokenizer: Any
    method: Method
    max_new_tokens: int = 256
    messages: list[dict[str, str]] = field(default_factory=list)
    conversation: Conversation | None = None

    def answer(self, text: str) -> Generation:
        """Print the answer to `text` as it comes, then its cost. Raises ValueError for a text that cannot be asked."""
        import torch
        from transformers import TextStreamer

        from lazyllm.engine.generation import Greedy, end_ids_of, start

        check_text(text)
        tokenizer, end_ids = self.tokenizer, end_ids_of(self.model)
        conversation, self.conversation = self.conversation, None  # kept only if the answer succeeds
        messages, new_ids = [*self.messages, {"role": "user", "content": text}], None
        args = thinking_args(tokenizer) if tokenizer.chat_template else {}
        if conversation is not None:
            after_answer = tokenizer(text_between_answers(tokenizer, text, args), add_special_tokens=False).input_ids
            # no new ids if the template leaves earlier answers out: then the whole chat is a new prompt
            new_ids = unseen_tokens(conversation.token_ids[-1], after_answer, end_ids) or None
        if conversation is None or new_ids is None:
            prompt = render(tokenizer, messages, args) if tokenizer.chat_template else text
            ids = tokenizer(prompt, add_special_tokens=not tokenizer.chat_template).input_ids
            conversation = start(self.model, ids, self.method)
        streamer: Any = TextStreamer(tokenizer, skip_special_tokens=True)

        class Streaming(Greedy):
            def read(self, sampled: list[float]) -> tuple[int, bool]:
                token_id, is_last = super().read(sampled)
                streamer.put(torch.tensor([token_id]))
                return token_id, is_last

        out = conversation.answer_with(Streaming(end_ids), new_ids, self.max_new_tokens)
        streamer.end()
        if tokenizer.chat_template:
            answer = {"role": "assistant", "content": tokenizer.decode(out.token_ids, skip_special_tokens=True)}
            self.conversation, self.messages = conversation, [*messages, answer]
        print(
            f"[TTFT {out.ttft_s:.3f} s | {out.pct_prompt_tokens_computed:.1f} % of {out.prompt_tokens} prompt tokens "
            f"computed, {out.revived.max()} revived | {len(out.token_ids)} tokens in {out.total_s:.3f} s]",
            file=sys.stderr,
        )
        return out


def check_text(text: str) -> None:
    """Raise ValueError for bytes of the terminal or the command line that are not UTF-8."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("the text is not UTF-8")


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"--prompt-file {file}: cannot be read as UTF-8 text ({reason_of(error)})") from error


def main(arguments: Sequence[str]) -> None:
    """The command `chat`. Raises UserError, before torch is imported if it can."""
    parser = parser_of("chat", __doc__)
    add = parser.add_argument
    add("--model", default="tiny", help="preset (tiny, llama2, ...), folder or hub id; default tiny")
    add("--tokenizer", help="folder or hub id of another tokenizer than the model's")
    add("--dtype", default="bfloat16")
    add("--device", default="auto")
    add("--schedule", default="paper", help="paper (Figure 4's), none (no pruning), or {layer: keep ratio, ...}")
    add("--method", help="another method, instead of a schedule: NAME, or 'NAME {parameter: value, ...}'")
    add("--max-new-tokens", type=int, default=256)
    add("--prompt-file", type=Path, help="text before the (first) question, UTF-8")
    add("--once", metavar="TEXT", help="answer TEXT and end; - reads it from standard input")
    options = parser.parse_args(arguments)
    if options.max_new_tokens < 1:
        raise UserError("--max-new-tokens is 1 or more")
    name, _, text = (options.method or "lazy").partition(" ")
    try:
        settings = dict(yaml.safe_load(text or "{}")) if options.method else {"schedule": options.schedule}
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--method {options.method}: expected NAME, or 'NAME {{parameter: value, ...}}'") from error
    spec = ModelSpec(options.model, dtype=options.dtype, device=options.device, tokenizer=options.tokenizer)
    try:
        context = "" if options.prompt_file is None else _text_of(options.prompt_file) + "\n"
        check_text(options.once or "")
        method = make(name, settings)
        spec.check()
        source_of(spec.name)  # refuses what is no model

        from lazyllm.models.load import check_loading, load_tokenizer_of, load_weights

        method.check(check_loading(spec))
        chat = Chat(load_weights(spec), load_tokenizer_of(spec), method, options.max_new_tokens)
        if options.once is not None:
            chat.answer(context + (sys.stdin.read() if options.once == "-" else options.once))
            return
    except (OSError, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    print(f"{options.model}, {chat.method}. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
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
