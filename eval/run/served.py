"""Measuring servers: one beside another, or one alone, on the prompts that a model in this process would get."""

from __future__ import annotations

import json
import logging
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from eval.analysis.columns import PROMPT_ENDS
from eval.benchmarks.chat_format import THOUGHT_END
from eval.run.config import SERVER
from eval.run.measure import WARMUP_TOKENS, Case, scored
from eval.run.resolved import Resolved
from eval.server.client import Answer, Client, Endpoint, RequestError
from eval.server.kinds import Server, describe
from eval.store.record import PROMPT_END, Failure, Measurement, Record, Trace
from lazyllm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


BLOCK = 32  # requests to one side before the other under load, or four times those at once


def describe_servers(run: Resolved) -> dict[str, Server]:
    """The server at model.url, and the method's: the same for the method `baseline`. Raises UserError."""
    model, settings = run.config.model, run.method
    common = {"api": model.api, "key_env": model.key_env, "timeout_s": model.timeout_s}
    url = str(model.url).rstrip("/")
    baseline = describe(Endpoint(url, model.name, extra_body=model.extra_body, **common), model.kind)
    if settings["name"] != SERVER:
        return {"baseline": baseline, "method": baseline}
    own = str(settings.get("url") or url).rstrip("/")
    kind = settings.get("kind") or (model.kind if own == url else None)
    extra = {**model.extra_body, **settings.get("extra_body", {})}
    endpoint = Endpoint(own, settings.get("model", model.name), extra_body=extra, **common)
    return {"baseline": baseline, "method": describe(endpoint, kind)}


@dataclass(frozen=True)
class Servers:
    """The servers of a run: what `eval.run.measure.Bench` is for a model in this process.

    sides: those to ask, by name. The prompts are text, or token ids if the server takes them. By default every prompt
    is kept out of the prefix caches (`Kind.cold`), and refused if the server counts other prompt tokens than we.
    """

    run: Resolved
    tokenizer: PreTrainedTokenizerBase
    sides: dict[str, Server]
    _clients: defaultdict[str, SimpleQueue[Client]] = field(default_factory=lambda: defaultdict(SimpleQueue))
    _open: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def warm_up(self, cases: Sequence[Case], runs: int) -> None:
        """Short answers to the longest prompt of each range of lengths, as servers compile for each."""
        longest: dict[int, Case] = {}
        for case in sorted(cases, key=lambda case: len(case.prompt.token_ids)):
            longest[sum(len(case.prompt.token_ids) > end for end in PROMPT_ENDS)] = case
        for case in longest.values():
            for side in [*self.sides] * runs:
                answer = self._ask(side, case, secrets.token_hex(8), WARMUP_TOKENS)
                if isinstance(answer, RequestError):
                    log.warning("warming up on %s, row %s failed (%s)", *case.key, answer)

    def measure(self, cases: Sequence[Case]) -> Iterator[Record | Failure]:
        """The sides answer in turns, in an order drawn by the seed: prompt by prompt, or in blocks under load."""
        load, rng = self.run.config.load, random.Random(self.run.config.seed)
        alone = load.concurrency == 1 and load.rate is None
        size = 1 if alone else load.block or max(BLOCK, 4 * load.concurrency)
        apart = len({server.endpoint.root for server in self.sides.values()}) == len(self.sides)
        waiting = iter(cases)
        while block := list(islice(waiting, size)):
            noise, answers = [secrets.token_hex(8) for _ in block], {}
            for side in rng.sample([*self.sides], len(self.sides)):
                answers[side] = self._answers(side, block, noise, rng)
                if not apart:  # the server would take the other side's prompt from its cache
                    noise = [secrets.token_hex(8) for _ in block]
            for number, case in enumerate(block):
                yield self._outcome(case, {side: answers[side][number] for side in self.sides})

    def trace(self, case: Case) -> Trace:
        raise RuntimeError("a server does not tell what its layers compute")

    def _answers(self, side: str, block: Sequence[Case], noise: list[str], rng: random.Random) -> list[Any]:
        """An `Answer` or RequestError each: one after the other, or with the run's number at once, or at its rate."""
        load = self.run.config.load
        if load.concurrency == 1 and load.rate is None:
            return [self._ask(side, *one) for one in zip(block, noise, strict=True)]
        futures: list[Future[Answer | RequestError]] = []
        with ThreadPoolExecutor(len(block) if load.rate is not None else load.concurrency) as pool:
            for one in zip(block, noise, strict=True):
                futures.append(pool.submit(self._ask, side, *one))
                if load.rate is not None:
                    time.sleep(rng.expovariate(load.rate))
        return [future.result() for future in futures]

    def _ask(self, side: str, case: Case, noise: str, most: int | None = None) -> Answer | RequestError:
        """One request, on a connection that no other request uses. most: new tokens, in place of the dataset's."""
        free = self._clients[side]
        try:
            client = free.get_nowait()
        except Empty:
            client = self._open.enter_context(Client(self.sides[side].endpoint))
        try:
            return self._timed(client, self.sides[side], case, f"[{noise}]\n", most or case.max_new_tokens)
        except RequestError as error:
            return error
        finally:
            free.put(client)

    def _timed(self, client: Client, server: Server, case: Case, noise: str, most: int) -> Answer:
        config = self.run.config
        is_warm = config.model.cache == "warm"
        cold = "nothing" if is_warm else server.kind.cold
        if cold == "flush" and (config.load.concurrency > 1 or config.load.rate is not None):
            cold = "noise"  # a cache in use cannot be flushed
        noise = noise if cold == "noise" else ""
        prompt, count = self._prompt(case, server, noise)
        fields: dict[str, Any] = {"model": server.endpoint.model, "stream": True, "max_tokens": most, **prompt}
        fields |= {**server.kind.sampling, "seed": config.seed}
        fields |= {"stream_options": {"include_usage": True}} if server.kind.usage else {}
        fields |= {"stop": ["\n"]} if case.dataset.newline_ends else {}
        fields |= {"cache_salt": secrets.token_hex(16)} if cold == "salt" else {}
        fields |= {"cache_prompt": False} if cold == "off" else {}
        body = json.dumps(fields | dict(server.endpoint.extra_body)).encode()
        if cold == "flush":
            client.post(f"{server.endpoint.root}/flush_cache")
        if is_warm:
            client.answer(body)
        answer = client.answer(body)
        told, cached = answer.request.prompt_tokens, answer.request.cached_tokens
        if None not in (told, count) and told != count and not config.model.trust_prompt:
            raise UserError(
                f"{case.dataset.name}, row {case.example.id}: {server.endpoint.url} counts {told} prompt tokens, but "
                f"{count} were sent: it cuts or changes the prompt, or model.tokenizer is not its own; "
                "model.trust_prompt=true accepts its count"
            )
        if cached is not None and cached > 1 and not is_warm:  # the first token may be the same in all prompts
            raise UserError(
                f"{case.dataset.name}, row {case.example.id}: {server.endpoint.url} took {cached} prompt tokens from "
                "its cache: turn its prefix cache off, or give model.kind, or measure it with model.cache=warm"
            )
        return replace(answer, request=replace(answer.request, noise=noise or None))

    def _prompt(self, case: Case, server: Server, noise: str) -> tuple[dict[str, Any], int | None]:
        """The request's fields with the prompt, and its number of tokens by our tokenizer; None if unknown."""
        model, prompt = self.run.config.model, case.prompt
        if model.api == "chat":
            said = [{"role": "system", "content": model.system}] if model.system is not None else []
            messages = [*said, {"role": "user", "content": noise + prompt.text}]
            arguments = {"chat_template_kwargs": dict(model.chat_args)} if model.chat_args else {}
            if not getattr(self.tokenizer, "chat_template", None):
                return {"messages": messages, **arguments}, None
            ids: Any = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, **(model.chat_args or {})
            )
            return {"messages": messages, **arguments}, len(ids)
        if server.kind.token_ids and not noise:
            return {"prompt": list(prompt.token_ids)}, len(prompt.token_ids)
        begin = str(self.tokenizer.bos_token or "")
        begin = begin if prompt.text.startswith(begin) else ""
        text = begin + noise + prompt.text.removeprefix(begin)
        assert prompt.encode is not None
        ids = prompt.encode(text)
        if self.tokenizer(text, verbose=False)["input_ids"] != ids:  # the server would write a second begin token
            text = text.removeprefix(begin)
        return {"prompt": text}, len(ids)

    def _outcome(self, case: Case, answers: dict[str, Answer | RequestError]) -> Record | Failure:
        measured: dict[str, Measurement] = {}
        for side, answer in answers.items():
            if isinstance(answer, RequestError):
                reason = f"{self.sides[side].endpoint.url}: {answer}"
                return Failure(*case.key, reason, f"RequestError: {reason}")
            measured[side] = self._measurement(case, answer)
        method, baseline = measured["method"], measured.get("baseline")
        if baseline is not None:
            method = replace(method, same_answer=int(method.text == baseline.text))
        return Record(
            dataset=case.dataset.name,
            id=case.example.id,
            prompt_sha256=case.prompt.sha256,
            prompt_tokens=len(case.prompt.token_ids),
            prompt_tokens_before_truncation=case.prompt.tokens_before_truncation,
            method=method,
            baseline=baseline,
            prompt_end=case.prompt.text[-PROMPT_END:],
            answers=list(case.example.answers),
            groups=list(case.example.groups),
        )

    def _measurement(self, case: Case, answer: Answer) -> Measurement:
        thinks = self.run.chat.thinking_tokens and answer.reasoning
        return Measurement(
            **scored(case, f"{answer.reasoning}{THOUGHT_END}{answer.text}" if thinks else answer.text, self.run.chat),
            ttft_s=answer.ttft_s,
            scoring_tokens=None,
            total_s=answer.last_token_s,
            total_s_so_far=answer.last_token_s,
            request=answer.request,
        )
