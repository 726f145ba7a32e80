"""Measuring servers: one beside another, or one alone, on the prompts that a model in this process would get."""

import json
import logging
import random
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from eval.analysis.columns import PROMPT_ENDS
from eval.benchmarks.chat_format import THOUGHT_END
from eval.run.arms import Arm
from eval.run.cases import Case
from eval.run.measure import WARMUP_TOKENS, in_turn, scored, visit_of
from eval.run.run import Run
from eval.serving.client import Completion, RequestError, Server
from eval.store.visit import Answer, Failure, Fidelity, Times, Visit
from lazyllm.errors import UserError

log = logging.getLogger(__name__)

BLOCK = 32  # requests to one arm before the next under load, or four times those at once


@dataclass(frozen=True)
class Servers:
    """Measures the servers of a run, as `eval.run.measure.Bench` measures a model in this process.

    The prompts are text, or token ids if the server takes them. By default every prompt is kept out of the prefix
    caches (`Kind.cold`), and refused if the server counts other prompt tokens than we.
    """

    run: Run
    _secret: str = field(default_factory=secrets.token_hex)

    def warm_up(self, cases: Sequence[Case], runs: int) -> None:
        """Short answers to the longest prompt of each range of lengths, as servers compile for each."""
        ordered = sorted(cases, key=lambda case: len(case.prompt.token_ids))
        longest = {sum(len(case.prompt.token_ids) > end for end in PROMPT_ENDS): case for case in ordered}
        for case in longest.values():
            for arm in self.run.arms * runs:
                try:
                    self._timed(arm, case, [], WARMUP_TOKENS, secrets.token_hex(8))
                except RequestError as error:
                    log.warning("warming up on %s, row %s failed (%s)", *case.key, error)

    def measure(self, cases: Sequence[Case]) -> Iterator[Visit]:
        """The arms answer in turn: prompt by prompt in each visit's order, or under load in blocks with theirs.

        Under load, an arm has the run's number of conversations at once, or they begin at the run's rate.
        """
        load, rng, waiting = self.run.config.load, random.Random(self.run.config.seed), iter(cases)
        most = max(BLOCK, 4 * load.concurrency) if load.is_shared else 1
        for number in count():
            if not (block := list(islice(waiting, most))):
                return
            order = [arm.label for arm in (in_turn(self.run.arms, number) if load.is_shared else block[0].arms)]
            answers: list[dict[str, list[Completion] | Failure]] = [{} for _ in block]
            for label in order:
                asked = [(place, arm) for place, case in enumerate(block) for arm in case.arms if arm.label == label]
                futures, is_over = [], threading.Event()
                with ThreadPoolExecutor(load.concurrency if load.rate is None else len(block)) as pool:
                    for place, arm in asked:
                        futures.append(pool.submit(self._converse_until, is_over, arm, block[place]))
                        time.sleep(0 if load.rate is None else rng.expovariate(load.rate))
                    wait(futures, return_when=FIRST_EXCEPTION)
                    pool.shutdown(cancel_futures=True)  # after an error, as a server that is gone fails all others too
                for (place, _), future in zip(asked, futures, strict=True):
                    answers[place][label] = future.result()
            for case, given in zip(block, answers, strict=True):
                arms = tuple(sorted(case.arms, key=lambda arm: order.index(arm.label)))
                baseline, measured = given.get(self.run.baseline or ""), dict[str, list[Answer] | Failure]()
                for label, own in given.items():
                    is_failure = isinstance(own, Failure)
                    measured[label] = own if is_failure else self._measurements(case, own, baseline)
                yield visit_of(replace(case, arms=arms), self.run.arms, measured)

    def _converse_until(self, is_over: threading.Event, arm: Arm, case: Case) -> list[Completion] | Failure:
        """`_converse`. An error that ends the run sets `is_over`; no conversation begins after it, so that a server
        that is gone costs one series of retries."""
        if is_over.is_set():
            raise CancelledError
        try:
            return self._converse(arm, case)
        except BaseException:
            is_over.set()
            raise

    def _converse(self, arm: Arm, case: Case) -> list[Completion] | Failure:
        """The answers of a conversation; each message follows the server's own answers."""
        # arms that share a server must not share its prefix cache
        roots = [server.root for server in self.run.servers.values()]
        has_own_cache = len({*roots}) == len(roots)
        answers: list[Completion] = []
        try:
            for turn in range(1 + len(case.prompt.turns)):
                seed = f"{self._secret}{case.key}{turn}{'' if has_own_cache else arm.label}"
                mark = random.Random(seed).randbytes(8).hex()
                answers.append(self._timed(arm, case, answers, case.max_new_tokens, mark))
        except RequestError as error:
            return Failure(reason=f"{self.run.servers[arm.label].url}: {error}", traceback=repr(error))
        return answers

    def _timed(self, arm: Arm, case: Case, earlier: Sequence[Completion], most: int, mark: str) -> Completion:
        """The answer that follows the earlier ones. most: new tokens. mark: text that no other prompt has."""
        config, server = self.run.config, self.run.servers[arm.label]
        is_warm = config.server.cache == "warm"
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
        counted, cached = answer.request.prompt_tokens, answer.request.cached_tokens
        where = f"{case.dataset.name}, row {case.example.id}: {server.url}"
        if None not in (counted, count) and counted != count and not config.server.allow_token_mismatch:
            raise UserError(
                f"{where} counts {counted} prompt tokens, but {count} were sent: it cuts or changes the prompt, or "
                "model.tokenizer is not its own; server.allow_token_mismatch=true accepts its count"
            )
        if cached is not None and cached > 1 and not is_warm:  # the first token may be the same in all prompts
            raise UserError(
                f"{where} took {cached} prompt tokens from its cache: turn its prefix cache off, or give server.kind, "
                "or measure it with server.cache=warm"
            )
        return replace(answer, request=replace(answer.request, noise=noise or None))

    def _prompt(
        self, case: Case, server: Server, noise: str, earlier: Sequence[Completion]
    ) -> tuple[dict[str, Any], int | None]:
        """The request's fields with the conversation, and its tokens by our tokenizer; None if unknown."""
        model, prompt, tokenizer = self.run.config.model, case.prompt, self.run.tokenizer
        texts = [prompt.text]
        for answer, turn in zip(earlier, prompt.turns, strict=False):
            texts += [answer.text, turn.text]
        if self.run.config.server.api == "chat":
            texts[0] = noise + texts[0]
            messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
            messages[:0] = [{"role": "system", "content": model.system}] if model.system is not None else []
            fields = {"messages": messages} | ({"chat_template_kwargs": model.chat_args} if model.chat_args else {})
            if not getattr(tokenizer, "chat_template", None):
                return fields, None
            options: Any = {"add_generation_prompt": True, "return_dict": False, **(model.chat_args or {})}
            return fields, len(tokenizer.apply_chat_template(messages, **options))
        begin = str(tokenizer.bos_token or "")
        begin = begin if prompt.text.startswith(begin) else ""
        text = begin + noise + "".join(texts).removeprefix(begin)
        assert prompt.encode is not None
        ids = prompt.encode(text) if noise or earlier else list(prompt.token_ids)
        if server.takes.token_ids:
            return {"prompt": ids}, len(ids)
        if tokenizer(text, verbose=False)["input_ids"] != ids:  # the server would write a second begin token
            text = text.removeprefix(begin)
        return {"prompt": text}, len(ids)

    def _measurements(
        self, case: Case, answers: list[Completion], baseline: list[Completion] | Failure | None
    ) -> list[Answer]:
        chat, measured, so_far = self.run.chat, list[Answer](), 0.0
        for turn, answer in enumerate(answers):
            thinks, so_far = chat.thinking_tokens and answer.reasoning, so_far + answer.last_token_s
            text = f"{answer.reasoning}{THOUGHT_END}{answer.text}" if thinks else answer.text
            times = Times(ttft_s=answer.ttft_s, total_s=answer.last_token_s, total_s_so_far=so_far)
            fidelity = None
            if isinstance(baseline, list) and answers is not baseline:
                fidelity = Fidelity(same_answer=int(answer.text == baseline[turn].text))
            own = scored(case, text, chat, turn)
            measured.append(Answer(**own, times=times, fidelity=fidelity, request=answer.request))
        return measured
