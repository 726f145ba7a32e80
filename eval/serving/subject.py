"""Servers as the subject of a run: one beside another, or one alone, on the prompts of a model in this process."""

from __future__ import annotations

import json
import logging
import random
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eval.benchmarks.chat_format import THOUGHT_END, ChatFormat, chat_format
from eval.benchmarks.suite import Dataset
from eval.run.arms import Arm, check_distinct
from eval.run.case import Case, scored, visit_of
from eval.run.settings import SERVER, SERVER_KINDS, SERVER_SETTINGS, RunConfig
from eval.run.subject import WARMUP_TOKENS, Load, in_turn
from eval.serving.client import Completion, RequestError, Server, describe
from eval.store.visit import Answer, Failure, Fidelity, Times, Trace, Visit
from lazyllm.errors import UserError, require
from lazyllm.models.tokenizers import chat_templates, tokenizer_of
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

BLOCK = 32  # requests to one arm before the next under load, or four times those at once


_OF_THE_RUN = {"model", "prompt", "messages", "stream", "stream_options", "max_tokens", "stop"}  # fields of a request
SOURCES = ("eval/serving/client.py", "eval/serving/subject.py", "eval/run/case.py")  # that can change a number


@dataclass(frozen=True)
class Servers:
    """Servers in the place of a model (`eval.run.subject`). arm_settings: {label of an arm: its settings}.

    spec: the model behind them, whose tokenizer is known.
    """

    config: RunConfig
    arm_settings: Mapping[str, dict[str, Any]]
    spec: ModelSpec
    chat: ChatFormat
    counts_last = True  # as servers do

    @property
    def name(self) -> str:
        return self.config.model.name

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        return ()

    @cached_property
    def servers(self) -> dict[str, Server]:
        """{label of an arm: its server}, asked what they are. Raises UserError."""
        server, asked, servers = self.config.server, dict[str, Server](), dict[str, Server]()
        for label, settings in self.arm_settings.items():
            url: Any = settings.get("url") or server.url
            kind = settings.get("kind") or (server.kind if url.rstrip("/") == str(server.url).rstrip("/") else None)
            extra = {**(server.extra_body or {}), **(settings.get("extra_body") or {})}
            name = settings.get("model") or self.config.model.name
            asked[label] = Server(url, name, kind, server.api, extra, server.api_key_env, server.timeout_s)
            same = next(other for other in asked if asked[other] == asked[label])
            servers[label] = servers[same] if same in servers else describe(asked[label])
        return servers

    def check(self) -> None:
        chat_templates(*tokenizer_of(self.spec))  # refuses what is no tokenizer
        _ = self.servers

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        from lazyllm.models.load import load_tokenizer_of

        tokenizer = load_tokenizer_of(self.spec)
        assert tokenizer is not None
        return tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        return ()

    @property
    def positions(self) -> int | None:
        reported = [server.positions for server in self.servers.values() if server.positions is not None]
        return min(reported, default=None)

    def arms(self, datasets: Sequence[Dataset], tokens: int | None, limit: int | None) -> tuple[Arm, ...]:
        check_distinct(self.arm_settings)
        return tuple(Arm(label, settings) for label, settings in self.arm_settings.items())

    def batch_size(self, arms: Sequence[Arm], prompt_tokens: int, new_tokens: int) -> int:
        return 1

    def identity(self, arms: Sequence[Arm]) -> dict[str, Any]:
        from eval.run.identity import code_sha256, versions

        config = self.config
        return {
            "model": config.model.name,
            "server": {key: getattr(config.server, key) for key in ("api", "cache", "extra_body")},
            "load": {"concurrency": config.load.concurrency, "rate": config.load.rate},
            "engine": code_sha256(SOURCES),
            "versions": versions(),
            "arms": {arm.label: self._of_arm(arm) for arm in arms},
        }

    def _of_arm(self, arm: Arm) -> dict[str, Any]:
        server = self.servers[arm.label]
        reported = {"url": server.url, "kind": server.kind, "version": server.version, "model": server.name}
        return {"method": {key: value for key, value in arm.settings.items() if key != "turns"}, "server": reported}

    @property
    def device(self) -> str:
        return "server"

    @contextmanager
    def ready(
        self, arms: Sequence[Arm], baseline: str | None, batch_size: int, load: Load | None = None
    ) -> Iterator[Client]:
        yield Client(self, arms, baseline)


def subject_of(config: RunConfig, arms: Mapping[str, dict[str, Any]]) -> Servers:
    """The servers that the settings name. Raises UserError for what servers cannot do, and for URLs of none."""
    model, server = config.model, config.server
    spec = ModelSpec(model.tokenizer or model.name, revision=model.revision, seed=config.seed)
    by_server = server.api == "chat"  # which applies the model's template
    chat = chat_format(
        "none" if by_server else model.chat,
        args={} if by_server else model.chat_args or {},
        system=None if by_server else model.system,
        today=model.today,
        thinking_tokens=model.thinking_tokens,
    )
    for extra in (server.extra_body or {}, *(settings.get("extra_body") or {} for settings in arms.values())):
        require(isinstance(extra, dict), "extra_body", extra, "a mapping of fields, such as {top_k: 1}")
        own = ", ".join(sorted(_OF_THE_RUN & extra.keys()))
        require(not own, "extra_body", own, "other fields: the run gives these itself")
    for settings in arms.values():
        name, unknown = settings.get("name", ""), settings.keys() - {*SERVER_SETTINGS, "name", "turns"}
        if name not in ("baseline", SERVER):
            raise UserError(
                f"method={name} runs inside transformers: serve it (lazyllm-bench serve model=NAME method={name} "
                "port=8123), then give method=server method.url=http://127.0.0.1:8123/v1"
            )
        if unknown:
            raise UserError(f"method server has no setting {min(unknown)!r}; it has {', '.join(SERVER_SETTINGS)}")
        kind = settings.get("kind")
        require(kind in (None, *SERVER_KINDS), "method.kind", kind, " or ".join(SERVER_KINDS))
    for url in (server.url, *(settings["url"] for settings in arms.values() if settings.get("url") is not None)):
        parts = urlsplit(url or "")
        if parts.username is not None:
            raise UserError(f"a URL with a name or password would be stored: give a key in {server.api_key_env}")
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query
        require(is_address, "url", url, "a URL such as http://127.0.0.1:8000/v1")
    is_source = model.tokenizer is not None or "/" in model.name or Path(model.name).exists()
    require(is_source, "model.tokenizer", "null", "FOLDER_OR_HUB_ID of the served model, as prompts are made here")
    has_own = by_server and model.chat not in (None, "none")
    require(not has_own, "model.chat", model.chat, "none: the server applies its own template")
    one = config.load.rate is None or config.load.concurrency == 1
    require(one, "load.concurrency", config.load.concurrency, "1 with load.rate")
    require(config.trace == 0, "trace", config.trace, "0, as a server does not tell what its layers compute")
    expected = "null, as a server does not tell the probabilities that it needs"
    require(config.fidelity is None, "fidelity", config.fidelity, expected)
    require(config.question is None, "question", config.question, "null, as a server gets each prompt as a whole")
    return Servers(config, arms, spec, chat)


@dataclass(frozen=True)
class Client:
    """Asks the servers of a run (`eval.run.subject.Answerer`).

    The prompts are text, or token ids if the server takes them. By default every prompt is kept out of the prefix
    caches (`Kind.cold`), and refused if the server counts other prompt tokens than we.
    """

    subject: Servers
    arms: Sequence[Arm]
    baseline: str | None
    _secret: str = field(default_factory=secrets.token_hex)

    def warm_up(self, cases: Sequence[Case], runs: int) -> None:
        """Short answers to the longest prompt of each range of lengths, as servers compile for each."""
        from eval.analysis.columns import PROMPT_ENDS  # not at the top: it imports pandas

        ordered = sorted(cases, key=lambda case: len(case.prompt.token_ids))
        longest = {sum(len(case.prompt.token_ids) > end for end in PROMPT_ENDS): case for case in ordered}
        for case in longest.values():
            for arm in (*self.arms,) * runs:
                try:
                    self._timed(arm, case, [], WARMUP_TOKENS, secrets.token_hex(8))
                except RequestError as error:
                    log.warning("warming up on %s, row %s failed (%s)", *case.key, error)

    def visits(self, cases: Sequence[Case]) -> Iterator[Visit]:
        """The arms answer in turn: prompt by prompt in each visit's order, or under load in blocks with theirs.

        Under load, an arm has the run's number of conversations at once, or they begin at the run's rate.
        """
        load, rng, waiting = self.subject.config.load, random.Random(self.subject.config.seed), iter(cases)
        most = max(BLOCK, 4 * load.concurrency) if load.is_shared else 1
        for number in count():
            if not (block := list(islice(waiting, most))):
                return
            order = [arm.label for arm in (in_turn(self.arms, number) if load.is_shared else block[0].arms)]
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
                baseline, measured = given.get(self.baseline or ""), dict[str, list[Answer] | Failure]()
                for label, own in given.items():
                    is_failure = isinstance(own, Failure)
                    measured[label] = own if is_failure else self._measurements(case, own, baseline)
                yield visit_of(replace(case, arms=arms), self.arms, measured)

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
        roots = [server.root for server in self.subject.servers.values()]
        has_own_cache = len({*roots}) == len(roots)
        answers: list[Completion] = []
        try:
            for turn in range(1 + len(case.prompt.turns)):
                seed = f"{self._secret}{case.key}{turn}{'' if has_own_cache else arm.label}"
                mark = random.Random(seed).randbytes(8).hex()
                answers.append(self._timed(arm, case, answers, case.max_new_tokens, mark))
        except RequestError as error:
            return Failure(reason=f"{self.subject.servers[arm.label].url}: {error}", traceback=repr(error))
        return answers

    def _timed(self, arm: Arm, case: Case, earlier: Sequence[Completion], most: int, mark: str) -> Completion:
        """The answer that follows the earlier ones. most: new tokens. mark: text that no other prompt has."""
        config, server = self.subject.config, self.subject.servers[arm.label]
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
        model, prompt, tokenizer = self.subject.config.model, case.prompt, self.subject.tokenizer
        texts = [prompt.text]
        for answer, turn in zip(earlier, prompt.turns, strict=False):
            texts += [answer.text, turn.text]
        if self.subject.config.server.api == "chat":
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
        chat, measured, so_far = self.subject.chat, list[Answer](), 0.0
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

    def traces(self, case: Case, arms: Sequence[Arm]) -> Iterator[Trace]:
        raise AssertionError("a run of servers has no traces")  # `subject_of` refuses them
