"""A quick look at LazyLLM: talk to a model, or ask it about a long file.

Answers are streamed to standard output. After each answer, a line on standard error shows TTFT, the share of all turns'
prompt tokens that was computed (mean over layers), and the earlier tokens that this turn revived (in the layer with the
most). A model with a chat template keeps its session: a turn runs only what the template writes after the last answer.
If the template leaves earlier answers out, a line says so and the whole text is read again. Thoughts are off, and the
template's date is fixed. A model without a template completes each line separately. Ctrl-C stops an answer, Ctrl-D
ends.

    lazyllm-bench chat --model FOLDER_OR_HUB_ID
    lazyllm-bench chat --model llama2 --prompt-file report.txt --schedule '{9: 0.5, 19: 0.5}'
    lazyllm-bench chat --once "entry zanur lantern copper. Question: entry zanur" --max-new-tokens 8
    lazyllm-bench chat --schedule none --once - < question.txt          # without pruning, for comparison
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazyllm.errors import UserError
from lazyllm.models.chat_template import render, render_behind, thinking_args, tokens_behind
from lazyllm.spec import ModelSpec, source_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from lazyllm.engine.generation import Conversation, Generation
    from lazyllm.methods import Method


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. arguments: None takes those of the process."""
    options = _parser().parse_args(arguments)
    try:
        sampling = sampling_options(options)
        context = "" if options.prompt_file is None else options.prompt_file.read_text(encoding="utf-8")
        dtype = options.dtype or ("float32" if _is_tiny(options) else "bfloat16")
        spec = ModelSpec(options.model, dtype=dtype, device=options.device, tokenizer=options.tokenizer)
        spec.check()
        source_of(spec.name)  # refuses what is no model
        chat = _load(spec, options, method_of(options.schedule, options.method), context, sampling)
        if options.once is not None:
            chat.answer(sys.stdin.read() if options.once == "-" else options.once)
            return
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    method = options.method or options.schedule
    print(f"{options.model}, {method}. Ctrl-C stops an answer, Ctrl-D ends.", file=sys.stderr)
    for text in _lines():
        try:
            chat.answer(text)
        except (ValueError, RuntimeError) as error:  # a bad or too long prompt, or no memory: the next may be shorter
            print(f"error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n(given up)", file=sys.stderr)


def _is_tiny(options: argparse.Namespace) -> bool:
    """Whether the model is the tiny one: threads and a narrow dtype make it slower."""
    return options.model == "tiny"


def _load(spec: ModelSpec, options: argparse.Namespace, method: Method, context: str, sampling: dict[str, Any]) -> Chat:
    import torch  # after the arguments are checked, as it takes seconds
    from transformers.utils import logging

    from lazyllm.models.load import check_loading, load_tokenizer_of, load_weights

    logging.disable_progress_bar()
    if options.threads or _is_tiny(options):
        torch.set_num_threads(options.threads or 1)
    config = check_loading(spec)
    method.check(config)
    tokenizer = load_tokenizer_of(spec)
    model = load_weights(spec)
    if options.seed is not None:
        torch.manual_seed(options.seed)
    return Chat(model, tokenizer, method, context, sampling | {"max_new_tokens": options.max_new_tokens})


class Chat:
    """A conversation with one model: `answer` prints an answer, and remembers it if there is a chat template.

    context: text before the first question, "" for none. options: of `model.generate`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, method: Method, context: str, options: dict[str, Any]
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.method = method
        self.context = context
        self.options = options
        self.messages: list[dict[str, str]] = []
        self._session: Conversation | None = None

    def answer(self, text: str) -> Generation:
        """Stream the answer to `text`, and print its cost.

        Raises ValueError for a prompt that is empty or too long for the model; the conversation is then unchanged.
        """
        import torch
        from transformers import StoppingCriteriaList, TextStreamer

        from lazyllm.engine.generation import start
        from lazyllm.integrations.transformers_generate import TurnOf

        with_context = f"{self.context}\n{text}" if self.context else text
        messages = [*self.messages, {"role": "user", "content": text if self.messages else with_context}]
        behind = self._behind_the_answer(text)
        ids = [*self._session.token_ids, *behind] if self._session and behind else self._whole(messages, with_context)
        prompt = self._prompt(ids)
        session = self._session if self._session and behind else start(self.model, ids, self.method)
        self._session = None  # kept only if the answer succeeds
        streamer = TextStreamer(self.tokenizer, skip_special_tokens=True)  # transformers drops a `streamer` argument
        with _ctrl_c_stops() as stopped:
            out = self.model.generate(  # type: ignore[operator]
                prompt,
                attention_mask=torch.ones_like(prompt),
                custom_generate=partial(TurnOf(self.method, session=session), streamer=streamer),
                stopping_criteria=StoppingCriteriaList([lambda ids, scores: stopped()]),
                return_dict_in_generate=True,
                **self.options,
            )
        generation, self._session = out.generations[0], session
        said = self.tokenizer.decode(generation.token_ids, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": said}]
        print(summary(generation), file=sys.stderr, flush=True)
        return generation

    def _behind_the_answer(self, text: str) -> list[int]:
        """The tokens to run in the session so far; none if there is no session to go on with."""
        from lazyllm.engine.generation import end_ids_of

        if self._session is None or not self.tokenizer.chat_template:
            return []
        behind = render_behind(self.tokenizer, text, thinking_args(self.tokenizer))
        ids = self.tokenizer(behind, add_special_tokens=False).input_ids
        return [*tokens_behind(self._session.token_ids[-1], ids, end_ids_of(self.model))]

    def _whole(self, messages: list[dict[str, str]], text: str) -> list[int]:
        """The tokens of the conversation if there is a chat template, else of the text."""
        if not self.tokenizer.chat_template:
            return self.tokenizer(text).input_ids
        if self._session is not None:
            reason = "the chat template leaves earlier answers out"
            print(f"[reads the whole conversation again: {reason}]", file=sys.stderr)
        whole = render(self.tokenizer, messages, thinking_args(self.tokenizer))
        return self.tokenizer(whole, add_special_tokens=False).input_ids

    def _prompt(self, ids: list[int]) -> torch.Tensor:
        """[1, n] the token ids on the model's device. Raises ValueError for none, or too many."""
        import torch

        n, new = len(ids), self.options["max_new_tokens"]
        most = getattr(self.model.config, "max_position_embeddings", None)
        if n == 0:
            raise ValueError("the prompt is empty: write something, or give --prompt-file")
        if most is not None and n + new > most:
            raise ValueError(
                f"{n} prompt tokens and {new} new ones exceed the model's {most} positions: shorten the text, start a "
                "new conversation, or set a smaller --max-new-tokens"
            )
        return torch.tensor([ids], dtype=torch.long, device=self.model.device)


def summary(generation: Generation) -> str:
    """One line: TTFT, share of all turns' prompt tokens computed (mean over layers), revived tokens, total time."""
    tokens = len(generation.token_ids)
    return (
        f"[TTFT {generation.ttft_s:.3f} s | {generation.pct_prompt_tokens_computed:.1f} % of "
        f"{generation.prompt_tokens} prompt tokens computed, {generation.revived.max()} revived | "
        f"{tokens} tokens in {generation.total_s:.3f} s]"
    )


def method_of(schedule: str, method: str | None) -> Method:
    """LazyLLM with the schedule of `--schedule`, or the method of `--method`, installed packages' included.

    Raises ValueError or TypeError for a bad schedule, UserError for a bad method.
    """
    from lazyllm.methods import Baseline, Lazy, make

    if method is None:
        return Baseline() if schedule == "none" else Lazy(schedule)
    name, _, settings = method.partition(" ")
    return make(name, _settings_of(method, settings or "{}"))


def _settings_of(method: str, text: str) -> dict[str, Any]:
    import yaml

    try:
        return dict(yaml.safe_load(text))
    except (TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"--method {method}: expected a NAME, or a NAME and settings, e.g. 'random_drop {{keep: 0.5}}'"
        ) from error


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling options of `model.generate`; greedy without a temperature. Raises UserError."""
    top_k = 0 if options.top_k is None else options.top_k  # 0 means all tokens in transformers
    top_p = 1.0 if options.top_p is None else options.top_p
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens {options.max_new_tokens}: give 1 or more")
    if options.temperature < 0:
        raise UserError(f"--temperature {options.temperature}: give 0 (greedy) or more")
    if top_k < 0 or not 0 < top_p <= 1:
        raise UserError(f"--top-k {top_k} --top-p {top_p}: give a top-k of 0 or more and a top-p in (0, 1]")
    if options.temperature > 0:
        return {"do_sample": True, "temperature": options.temperature, "top_p": top_p, "top_k": top_k}
    if options.top_p is not None or options.top_k is not None:
        raise UserError("--top-p and --top-k need sampling: set --temperature too")
    return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}  # not the checkpoint's own


@contextmanager
def _ctrl_c_stops() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the answer after its next token, so that it is kept and counted; the second aborts it."""
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
    """The questions, one line each, until the end of standard input; empty lines are skipped."""
    mark = "> " if sys.stdin.isatty() else ""
    with suppress(ImportError):  # absent on some systems; it makes `input` edit lines and remember them
        import readline  # noqa: F401
    while True:
        try:
            if line := input(mark).strip():
                yield line
        except KeyboardInterrupt:
            print(file=sys.stderr)
        except EOFError:
            return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lazyllm-bench chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="tiny", help="preset (tiny, llama2, ...), folder or hub id; default tiny")
    add("--tokenizer", help="folder or hub id of another tokenizer than the model's")
    add("--dtype", help="default bfloat16; float32 for tiny")
    add("--device", default="auto")
    add("--threads", type=int, help="CPU threads; default torch's choice; 1 for tiny")
    add("--schedule", default="paper", help="paper (Figure 4's), none (no pruning), or {layer: keep ratio, ...}")
    add("--method", help="another method, instead of a schedule: NAME, or 'NAME {parameter: value, ...}'")
    add("--max-new-tokens", type=int, default=256)
    add("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    add("--top-p", type=float, help="with --temperature")
    add("--top-k", type=int, help="with --temperature")
    add("--seed", type=int, help="of the sampling")
    add("--prompt-file", type=Path, help="text before the (first) question, UTF-8")
    add("--once", metavar="TEXT", help="answer TEXT and end; - reads it from standard input")
    return parser


if __name__ == "__main__":
    main()
