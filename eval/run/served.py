"""Measuring servers: one beside another, or one alone, on the prompts that a model in this process would get."""

from __future__ import annotations

import json
import logging
import random
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from eval.analysis.columns import PROMPT_ENDS
from eval.benchmarks.chat_format import THOUGHT_END
from eval.run.measure import WARMUP_TOKENS, Case, record_of, scored
from eval.run.resolved import Resolved
from eval.server import Answer, RequestError, Server
from eval.store.record import Failure, Measurement, Record
from lazyllm.errors import UserError

log = logging.getLogger(__name__)

BLOCK = 32  # requests to one side before the other under load, or four times those at once


@dataclass(frozen=True)
class Servers:
    """The servers of a run: what `eval.run.measure.Bench` is for a model in this process.

    sides: those to ask, by name. The prompts are text, or token ids if the server takes them. By default every prompt
    is kept out of the prefix caches (`Kind.cold`), and refused if the server counts other prompt tokens than we.
    """

    run: Resolved
    tokenizer: PreTrainedTokenizerBase
    sides: dict[str, Server]
    _secret: str = field(default_factory=secrets.token_hex)

    def warm_up(self, cases: Sequence[Case], runs: int) -> None:
        """Short answers to the longest prompt of each range of lengths, as servers compile for each."""
        ordered = sorted(cases, key=lambda case: len(case.prompt.token_ids))
        longest = {sum(len(case.prompt.token_ids) > end for end in PROMPT_ENDS): case for case in ordered}
        for case in longest.values():
            for side in [*self.sides] * runs:
                try:
                    self._timed(side, case, [], WARMUP_TOKENS, secrets.token_hex(8))
                except RequestError as error:
                    log.warning("warming up on %s, row %s failed (%s)", *case.key, error)

    def measure(self, cases: Sequence[Case]) -> Iterator[Record | Failure]:
        """The sides answer in turns, in an order drawn by the seed: prompt by prompt, or in blocks under load.

        Under load, a side has the run's number of conversations at once, or they begin at the run's rate.
        """
        load, rng, waiting = self.run.config.load, random.Random(self.run.config.seed), iter(cases)
        while block := list(islice(waiting, max(BLOCK, 4 * load.concurrency) if load.is_shared else 1)):
            answers = dict[str, list[list[Answer] | Failure]]()
            for side in rng.sample([*self.sides], len(self.sides)):
                futures = []
                with ThreadPoolExecutor(load.concurrency if load.rate is None else len(block)) as pool:
                    for case in block:
                        futures.append(pool.submit(self._converse, side, case))
                        time.sleep(0 if load.rate is None else rng.expovariate(load.rate))
                    wait(futures, return_when=FIRST_EXCEPTION)
                    pool.shutdown(cancel_futures=True)  # a server that has gone is not tried for all the others
                answers[side] = [future.result() for future in futures]
            for number, case in enumerate(block):
                yield self._outcome(case, {side: given[number] for side, given in answers.items()})

    def _converse(self, side: str, case: Case) -> list[Answer] | Failure:
        """The answers of a conversation; each message follows the server's own answers."""
        is_first_only = side == "baseline" and self.run.paired == "ttft"
        # one server would take the other side's prompt from its cache
        apart = len({server.root for server in self.sides.values()}) == len(self.sides)
        answers: list[Answer] = []
        try:
            for turn in range(1 + len(case.prompt.turns)):
                mark = random.Random(f"{self._secret}{case.key}{turn}{'' if apart else side}").randbytes(8).hex()
                answers.append(self._timed(side, case, answers, 1 if is_first_only else case.max_new_tokens, mark))
        except RequestError as error:
            return Failure(*case.key, f"{self.sides[side].url}: {error}", repr(error))
        return answers

    def _timed(self, side: str, case: Case, earlier: Sequence[Answer], most: int, mark: str) -> Answer:
        """The answer that follows the earlier ones. most: new tokens. mark: text that no other prompt has."""
        config, server = self.run.config, self.sides[side]
        is_warm = config.model.cache == "warm"
        cold = "nothing" if is_warm else server.takes.cold
        if cold == "flush" and config.load.is_shared:
            cold = "noise"  # a cache in use cannot be flushed
        noise = f"[{mark}]\n" if cold == "noise" else ""
        prompt, count = self._prompt(case, server, noise, earlier)
        fields = {"model": server.name, "stream": True, "max_tokens": most, "seed": config.seed, **prompt}
        fields |= {"stream_options": {"include_usage": True}} if server.takes.usage else {}
        fields |= {"stop": ["\n"]} if case.dataset.newline_ends else {}
        fields |= {"salt": {"cache_salt": mark}, "off": {"cache_prompt": False}}.get(cold, {})
        body = json.dumps({**fields, **server.takes.sampling, **server.extra_body}).encode()
        if cold == "flush":
            server.ask("POST", f"{server.root}/flush_cache")
        answer = [server.answer(body) for _ in range(1 + is_warm)][-1]
        told, cached = answer.request.prompt_tokens, answer.request.cached_tokens
        where = f"{case.dataset.name}, row {case.example.id}: {server.url}"
        if None not in (told, count) and told != count and not config.model.trust_prompt:
            raise UserError(
                f"{where} counts {told} prompt tokens, but {count} were sent: it cuts or changes the prompt, or "
                "model.tokenizer is not its own; model.trust_prompt=true accepts its count"
            )
        if cached is not None and cached > 1 and not is_warm:  # the first token may be the same in all prompts
            raise UserError(
                f"{where} took {cached} prompt tokens from its cache: turn its prefix cache off, or give model.kind, "
                "or measure it with model.cache=warm"
            )
        return replace(answer, request=replace(answer.request, noise=noise or None))

    def _prompt(
        self, case: Case, server: Server, noise: str, earlier: Sequence[Answer]
    ) -> tuple[dict[str, Any], int | None]:
        """The request's fields with the conversation, and its tokens by our tokenizer; None if unknown."""
        model, prompt, tokenizer = self.run.config.model, case.prompt, self.tokenizer
        said = [prompt.text]
        for answer, turn in zip(earlier, prompt.turns, strict=False):
            said += [answer.text, turn.text]
        if model.api == "chat":
            said[:1] = [*case.example.earlier, said[0].removeprefix("".join(case.example.earlier))]
            said[0] = noise + said[0]
            messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
            messages[:0] = [{"role": "system", "content": model.system}] if model.system is not None else []
            fields = {"messages": messages} | ({"chat_template_kwargs": model.chat_args} if model.chat_args else {})
            if not getattr(tokenizer, "chat_template", None):
                return fields, None
            options: Any = {"add_generation_prompt": True, "return_dict": False, **(model.chat_args or {})}
            return fields, len(tokenizer.apply_chat_template(messages, **options))
        begin = str(tokenizer.bos_token or "")
        begin = begin if prompt.text.startswith(begin) else ""
        text = begin + noise + "".join(said).removeprefix(begin)
        assert prompt.encode is not None
        ids = prompt.encode(text) if noise or earlier else list(prompt.token_ids)
        if server.takes.token_ids:
            return {"prompt": ids}, len(ids)
        if tokenizer(text, verbose=False)["input_ids"] != ids:  # the server would write a second begin token
            text = text.removeprefix(begin)
        return {"prompt": text}, len(ids)

    def _outcome(self, case: Case, answers: dict[str, list[Answer] | Failure]) -> Record | Failure:
        measured, chat = dict[str, list[Measurement]](), self.run.chat
        for side, given in answers.items():
            if isinstance(given, Failure):
                return given
            measured[side], so_far = [], 0.0
            for turn, answer in enumerate(given):
                thinks, so_far = chat.thinking_tokens and answer.reasoning, so_far + answer.last_token_s
                text = f"{answer.reasoning}{THOUGHT_END}{answer.text}" if thinks else answer.text
                facts = scored(case, text, chat, turn)
                facts |= {"ttft_s": answer.ttft_s, "total_s": answer.last_token_s, "total_s_so_far": so_far}
                measured[side].append(Measurement(**facts, scoring_tokens=None, request=answer.request))
        beside = measured.get("baseline")
        if beside is None or self.run.paired == "ttft":
            alone = [(method, None) for method in measured["method"]]
            return record_of(case, alone, baseline_ttft_s=None if beside is None else beside[0].ttft_s)
        pairs = zip(measured["method"], beside, strict=True)
        return record_of(case, [(replace(a, same_answer=int(a.text == b.text)), b) for a, b in pairs])
