"""A quick look at LazyLLM: talk to a model, or ask it about a long file.

Answers are streamed to standard output; after each, standard error says how long the first token took and which share
of the prompt's tokens was computed. A model with a chat template gets the whole conversation again in every turn; any
other completes each line by itself. Ctrl-C stops an answer, Ctrl-D ends.

    python -m lazyllm.integrations.chat --model FOLDER_OR_HUB_ID
    python -m lazyllm.integrations.chat --model llama2 --prompt-file report.txt --schedule '{"9": 0.5, "19": 0.5}'
    python -m lazyllm.integrations.chat --once "entry zanur lantern copper. Question: entry zanur" --max-new-tokens 8
    python -m lazyllm.integrations.chat --schedule none --once - < question.txt          # without pruning, for
    comparison
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList, TextStreamer
from transformers.utils import logging

from lazyllm.engine.generation import Generation
from lazyllm.integrations.transformers_generate import using
from lazyllm.methods import Baseline, Lazy, Method, make
from lazyllm.methods.schedule import Schedule
from lazyllm.models.load import check_loading, load_tokenizer_of, load_weights
from lazyllm.models.spec import ModelSpec


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        context = "" if options.prompt_file is None else _text_of(options.prompt_file)
        sampling = sampling_options(options)
        spec = ModelSpec(options.model, dtype=options.dtype, device=options.device, tokenizer=options.tokenizer)
        config = check_loading(spec)
        method = method_of(options.schedule, options.method, config.num_hidden_layers)
        method.check(config)
        tokenizer = load_tokenizer_of(spec)
        model = load_weights(spec)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    if options.seed is not None:
        torch.manual_seed(options.seed)
    chat = Chat(model, tokenizer, method, context, sampling | {"max_new_tokens": options.max_new_tokens})
    if options.once is not None:
        text = sys.stdin.read() if options.once == "-" else options.once
        try:
            chat.answer(text)
        except (ValueError, RuntimeError) as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt:
            sys.exit(130)
        return
    print(
        f"{options.model}, {options.method or options.schedule}. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr
    )
    for text in _lines():
        try:
            chat.answer(text)
        except (ValueError, RuntimeError) as error:  # this prompt's, or this machine's memory: the next may be shorter
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(given up)", file=sys.stderr)


class Chat:
    """A conversation with one model: `answer` prints what it says, and remembers it where there is a chat template.

    context: text in front of the first question, "" for none. options: of `model.generate`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, method: Method, context: str, options: dict[str, Any]
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.method = method
        self.context = context
        self.options = options
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.messages: list[dict[str, str]] = []

    def answer(self, text: str) -> Generation:
        """Stream the answer to `text`, and say what it cost.

        Raises ValueError for an empty prompt and for one that is too long for the model. The conversation then stays as
        it was.
        """
        messages = [*self.messages, {"role": "user", "content": text if self.messages else self._with_context(text)}]
        prompt = self._prompt(messages, text)
        self._check(prompt)
        with _ctrl_c_stops() as stopped, using(self.model, self.method):
            out = self.model.generate(  # type: ignore[operator]
                prompt,
                attention_mask=torch.ones_like(prompt),
                streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
                stopping_criteria=StoppingCriteriaList([lambda ids, scores: stopped()]),
                return_dict_in_generate=True,
                **self.options,
            )
        generation = out.generations[0]
        said = self.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": said}]
        print(summary(generation), file=sys.stderr, flush=True)
        return generation

    def _with_context(self, text: str) -> str:
        return f"{self.context}\n{text}" if self.context else text

    def _prompt(self, messages: list[dict[str, str]], text: str) -> torch.Tensor:
        """[1, n] token ids on the model's device."""
        if self.has_template:
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        else:
            ids = self.tokenizer(self._with_context(text)).input_ids
        return torch.tensor([ids], dtype=torch.long, device=self.model.device)

    def _check(self, prompt: torch.Tensor) -> None:
        n, new = prompt.shape[1], self.options["max_new_tokens"]
        most = getattr(self.model.config, "max_position_embeddings", None)
        if n == 0:
            raise ValueError("the prompt is empty: write something, or give --prompt-file")
        if most is not None and n + new > most:
            raise ValueError(
                f"{n} prompt tokens and {new} new ones are more than the model's {most}: shorten the text, begin a new "
                "conversation, or set a smaller --max-new-tokens"
            )


def summary(generation: Generation) -> str:
    """One line: time to first token, share of prompt tokens computed (mean over layers), speed."""
    tokens = len(generation.token_ids)
    return (
        f"[TTFT {generation.ttft_s:.3f} s | {generation.pct_prompt_tokens_computed:.1f} % of "
        f"{generation.prompt_tokens} prompt tokens computed | {tokens} tokens in {generation.total_s:.3f} s]"
    )


def method_of(schedule: str, name: str | None, num_layers: int) -> Method:
    """LazyLLM with what `--schedule` names, or what `--method` names, which may be an installed package's.

    Raises ValueError or TypeError for what is no schedule of such a model, UserError for what is no method.
    """
    if name is not None:
        name, _, settings = name.partition(" ")
        return make(name, _json_of(settings or "{}", "--method is a NAME, or NAME and JSON such as"))
    given = _json_of(schedule, "--schedule is paper, none or JSON such as") if schedule.startswith("{") else schedule
    parsed = Schedule.parse(given, num_layers)
    return Lazy(parsed) if parsed.keep else Baseline()


def _json_of(text: str, wanted: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f'{wanted} {{"9": 0.7}}, got {text!r}: {error}') from error
    if not isinstance(found, dict):
        raise ValueError(f'{wanted} {{"9": 0.7}}, got {text!r}')
    return found


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """`model.generate`'s options for how tokens are chosen. Greedy without a temperature. Raises ValueError."""
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is at least 1, got {options.max_new_tokens}")
    if options.temperature == 0:
        if options.top_p is not None or options.top_k is not None:
            raise ValueError("--top-p and --top-k choose among samples: set --temperature too")
        # the checkpoint's own are for sampling
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if options.temperature < 0:
        raise ValueError(f"--temperature is 0 (greedy) or more, got {options.temperature}")
    top_k = 0 if options.top_k is None else options.top_k  # 0 is transformers' word for all
    top_p = 1.0 if options.top_p is None else options.top_p
    if top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"--top-k is 0 or more and --top-p lies in (0, 1], got {top_k} and {top_p}")
    return {"do_sample": True, "temperature": options.temperature, "top_p": top_p, "top_k": top_k}


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is no UTF-8 text: {error}") from error


@contextmanager
def _ctrl_c_stops() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the answer to end after its next token, so that it is kept and counted; a second one gives it up."""
    asked = False

    def handle(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _lines() -> Iterator[str]:
    """The questions, one line each, until the end of standard input; empty lines are left out."""
    mark = "> " if sys.stdin.isatty() else ""
    with suppress(ImportError):  # not on every system; it makes `input` edit lines and remember them
        import readline  # noqa: F401
    while True:
        try:
            line = input(mark).strip()
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        except EOFError:
            return
        if line:
            yield line


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m lazyllm.integrations.chat",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="tiny", help="preset (tiny, llama2, ...), folder or hub id; default tiny")
    parser.add_argument("--tokenizer", help="folder or hub id, where it is not the model's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--schedule", default="paper", help="paper (Figure 4's), none (no pruning), or JSON {layer: keep ratio}"
    )
    parser.add_argument(
        "--method", help="another method, instead of a schedule: NAME, or 'NAME {\"parameter\": value}'"
    )
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top-p", type=float, help="with --temperature")
    parser.add_argument("--top-k", type=int, help="with --temperature")
    parser.add_argument("--seed", type=int, help="of the sampling")
    parser.add_argument("--prompt-file", type=Path, help="text in front of the (first) question, UTF-8")
    parser.add_argument("--once", metavar="TEXT", help="answer this and end; - reads it from standard input")
    return parser


if __name__ == "__main__":
    main()
