"""One value for a run: its settings, and all that follows from them, each part made when it is first needed.

RunConfig -> Run -> Visit -> Results -> Table
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eval.benchmarks import SUITES
from eval.benchmarks.chat_format import ChatFormat, chat_format
from eval.benchmarks.datasets import datasets_asked_for, load, missing_rows
from eval.benchmarks.subsets import SUBSETS, in_split, in_subset, parse_shard, shard_numbers
from eval.benchmarks.suite import Dataset, DataSettings, DoesNotFitError, LoadedDataset, Suite
from eval.run import targets
from eval.run.arms import Arm, arms_asked, build_method, canonical_settings, check_distinct, method_asked
from eval.run.config import QUIET, prompt_limit
from eval.run.settings import SERVER, SERVER_KINDS, SERVER_SETTINGS, RunConfig
from eval.run.targets import OutOfReachError
from eval.run.work import fitting_batch
from lazyllm.errors import UserError, require
from lazyllm.methods import about_the_method, name_of
from lazyllm.models.checkpoint import HubError, read_config
from lazyllm.models.tokenizers import has_chat_template, tokenizer_of
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from eval.run.cases import Case
    from eval.serving.client import Server

log = logging.getLogger(__name__)

RUNS = Path("runs")  # the folder of runs without `out`, and `hydra.sweep.dir` of conf/config.yaml


@dataclass(frozen=True)
class Run:
    """A model, examples, and the arms that answer each of them. Every property may raise UserError."""

    config: RunConfig

    @property
    def is_served(self) -> bool:
        """Whether servers answer, not a model in this process."""
        return self.config.server.url is not None

    @cached_property
    def spec(self) -> ModelSpec:
        """The model; behind a server, its tokenizer's."""
        model = self.config.model
        if self.is_served:
            return ModelSpec(model.tokenizer or model.name, revision=model.revision, seed=self.config.seed)
        keys = [setting.name for setting in fields(ModelSpec) if setting.name != "seed"]
        spec = ModelSpec(**{key: getattr(model, key) for key in keys}, seed=self.config.seed)
        spec.check()
        if spec.is_dummy and spec.tokenizer is None and not spec.is_local:
            raise UserError(
                "random weights (model.load_format=dummy) download nothing, so the tokenizer must be given: "
                "model.tokenizer=FOLDER (with tokenizer.json or tokenizer.model) or model.tokenizer=HUB_ID"
            )
        return spec

    @cached_property
    def chat(self) -> ChatFormat:
        """The format of prompts and answers."""
        model, by_server = self.config.model, self.config.server.api == "chat"  # which applies the model's template
        return chat_format(
            "none" if by_server else model.chat,
            args={} if by_server else model.chat_args or {},
            system=None if by_server else model.system,
            today=model.today,
            thinking_tokens=model.thinking_tokens,
        )

    @cached_property
    def asked(self) -> dict[str, dict[str, Any]]:
        """{label: settings} of the arms that the settings ask for, in the order of tables, the baseline first."""
        arms = arms_asked(self.config)
        if self.is_served:
            _check_servers(self.config, arms)
        else:
            with_server = "model=server server.url=http://HOST:PORT/v1 with it"
            _check_unused("server", self.config.server, with_server)
            _check_unused("load", self.config.load, with_server)
            for settings in arms.values():
                require(settings.get("name") != SERVER, "method", SERVER, with_server)
                method_asked(settings)
        return arms

    @property
    def baseline(self) -> str | None:
        """The label of the baseline's arm; None without one."""
        return next(iter(self.asked)) if self.config.baseline else None

    @cached_property
    def _asked_datasets(self) -> tuple[Dataset, ...]:
        return datasets_asked_for(self.config.dataset, self.config.model.name)

    @property
    def suite(self) -> Suite:
        return SUITES[self._asked_datasets[0].suite]

    @property
    def limit(self) -> int | None:
        """The number of examples of each dataset."""
        return self.config.limit or self.suite.limit

    @cached_property
    def data(self) -> DataSettings:
        """The settings that determine the rows."""
        config, suite = self.config, self.suite
        is_own = config.subset in suite.subsets
        expected = f"{' or '.join(SUBSETS)}, as {suite.name} has no such rows"
        require(is_own or config.subset in SUBSETS, "subset", config.subset, expected)
        is_counted = is_own or config.subset == "first" or self.limit is not None
        require(is_counted, "subset", config.subset, "limit=50 or so with it")
        rows = None if self.limit is None else self.limit if config.split is None else 2 * self.limit
        data = DataSettings(
            dir=None if config.data.dir is None else Path(config.data.dir),
            on_error="skip" if config.data.on_error == "skip" else "raise",
            limit=rows if config.subset == "first" else None,  # of each two rows, one is in a split
            options=None if suite.options is None else getattr(config, suite.name),
            model=self.spec,
            chat=self.chat,
            turns=config.turns,
            subset=config.subset if is_own else None,
        )
        expected = f"dataset=NAME with it, as {suite.name} has rows of its own"
        require(data.dir is None or not suite.rows_here, "data.dir", data.dir, expected)
        for other in SUITES.values():
            if other.options is not None and other is not suite:
                instead = f"dataset={other.whole} with it: {self._asked_datasets[0].name} is of {suite.name}"
                _check_unused(other.name, getattr(config, other.name), instead)
        return data

    @cached_property
    def datasets(self) -> tuple[Dataset, ...]:
        """Those of one suite whose rows can be loaded; of a whole suite the others are left out, with a log line."""
        config, named, data = self.config, self._asked_datasets, self.data
        for dataset in named:
            self.suite.check(dataset, data)
        reasons = {dataset: reason for dataset in named if (reason := missing_rows(dataset, data)) is not None}
        is_whole = not config.dataset or config.dataset.get(self.suite.whole)
        if reasons and (not is_whole or len(reasons) == len(named)):
            dataset, reason = next(iter(reasons.items()))
            raise UserError(f"{dataset.name}: {reason}")
        for reason in dict.fromkeys(reasons.values()):
            left_out = ", ".join(dataset.name for dataset in reasons if reasons[dataset] == reason)
            log.warning("left out: %s: %s", left_out, reason)
        return tuple(dataset for dataset in named if dataset not in reasons)

    @cached_property
    def loaded(self) -> list[LoadedDataset]:
        """The datasets with their examples after `split`, `limit`, `subset` and `turns`; total: the rows before that.

        The error names each dataset whose rows do not fit.
        """
        config, whole, chosen, reasons = self.config, list[LoadedDataset](), list[LoadedDataset](), dict[str, str]()
        for dataset in self.datasets:
            try:
                whole.append(load(dataset, self.data))
            except DoesNotFitError as error:
                reasons[dataset.name] = str(error)
        if reasons:
            others = f", or leave out {' '.join(f'dataset.{name}=false' for name in reasons)}" if whole else ""
            raise UserError("; ".join(reasons.values()) + others)
        last = None if config.turns is None else config.turns - 1
        for data in whole:
            name = data.dataset.name
            if last and not any(example.turns for example in data.examples):
                raise UserError(f"turns={config.turns}: the rows of {name} hold one question each; leave it out")
            of_split = in_split(name, data.examples, config.split)
            if not of_split:
                raise UserError(f"split={config.split} leaves no example of {name}: it has too few rows")
            subset = in_subset(of_split, self.limit, config.subset, config.seed)
            examples = tuple(replace(example, turns=example.turns[:last]) for example in subset)
            chosen.append(replace(data, examples=examples, total=data.total or len(data.examples)))
        return chosen

    @cached_property
    def servers(self) -> dict[str, Server]:
        """{label of an arm: its server}, asked what they are; {} for a model in this process."""
        if not self.is_served:
            return {}
        from eval.serving.client import Server, describe

        server, asked, servers = self.config.server, dict[str, Server](), dict[str, Server]()
        for label, settings in self.asked.items():
            url: Any = settings.get("url") or server.url
            kind = settings.get("kind") or (server.kind if url.rstrip("/") == str(server.url).rstrip("/") else None)
            extra = {**(server.extra_body or {}), **(settings.get("extra_body") or {})}
            name = settings.get("model") or self.config.model.name
            asked[label] = Server(url, name, kind, server.api, extra, server.api_key_env, server.timeout_s)
            same = next(other for other in asked if asked[other] == asked[label])
            servers[label] = servers[same] if same in servers else describe(asked[label])
        return servers

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        """The config of the model in this process, after all checks that need no weights."""
        from lazyllm.models.load import check_loading

        return check_loading(self.spec)

    @cached_property
    def arms(self) -> tuple[Arm, ...]:
        """The arms that reach their target speedups, in order; the others are left out, with a log line."""
        if self.is_served:
            check_distinct(self.asked)
            return tuple(Arm(label, settings) for label, settings in self.asked.items())
        arms, shape, length = list[Arm](), self.shape, self.suite.length(self.data)
        for label, settings in self.asked.items():
            arm = Arm(label, settings)
            try:
                with about_the_method():
                    in_layers = targets.with_layers(settings, shape.num_hidden_layers)
                    for dataset in self.datasets:
                        solved = targets.solved(in_layers, dataset, shape, self.config.model.paper, length)
                        build_method(solved).check(shape)
                        arm.parameters[dataset.name] = solved
            except OutOfReachError as error:
                log.warning("left out: %s: %s", label, error)
            else:
                arms.append(arm)
        if not {arm.label for arm in arms} - ({self.baseline} if len(self.asked) > 1 else set()):
            raise UserError("no method reaches its speedup on this model: give another")
        check_distinct({arm.label: canonical_settings(arm.settings, shape.num_hidden_layers) for arm in arms})
        return tuple(arms)

    @cached_property
    def shape(self) -> PreTrainedConfig:
        """The model's shape, which needs no files for a preset."""
        from lazyllm.models.load import shape_of

        return shape_of(self.spec)

    @property
    def other_models(self) -> tuple[ModelSpec, ...]:
        """The models that the arms need besides `spec`, each once."""
        if self.is_served:
            return ()
        methods = map(method_asked, self.asked.values())
        return tuple(dict.fromkeys(spec for method in methods for spec in method.models()))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        from lazyllm.models.load import load_tokenizer_of

        tokenizer = load_tokenizer_of(self.spec)
        assert tokenizer is not None  # `spec` refuses random weights without one
        return tokenizer

    @cached_property
    def positions(self) -> int | None:
        """The model's positions, of prompt and answer; None if its server does not tell them."""
        if self.is_served:
            reported = [server.positions for server in self.servers.values() if server.positions is not None]
            return min(reported, default=None)
        return self.model_config.max_position_embeddings

    @cached_property
    def max_prompt_tokens(self) -> int:
        """Tokens of a prompt; longer ones lose their middle."""
        return limit_of_prompts(self, self.positions)

    def answer_limit(self, dataset: Dataset, most: int) -> int:
        """The most tokens of an answer, thoughts included. most: those of the dataset's own answers."""
        thinking = self.chat.thinking_tokens if dataset.chat_wrap else 0
        return min(most, self.config.max_new_tokens or most) + thinking

    @cached_property
    def cases(self) -> list[Case]:
        """All examples with their prompts, in order. Prompts that the model or an arm cannot take are refused."""
        from eval.run.cases import make_cases

        return make_cases(self)

    @cached_property
    def ours(self) -> list[Case]:
        """The cases that this job measures: all, or its shard's (`eval.benchmarks.subsets`)."""
        if self.config.shard is None:
            return self.cases
        number, count = parse_shard(self.config.shard)
        numbers = shard_numbers({case.key: len(case.prompt.token_ids) for case in self.cases}, count)
        return [case for case in self.cases if numbers[case.key] == number]

    @cached_property
    def batch_size(self) -> int:
        """Answers that decode together."""
        if self.is_served:
            return 1
        from lazyllm.measuring import memory_of
        from lazyllm.models.load import devices_in_use

        methods = [arm.method(dataset.name) for dataset in self.datasets for arm in self.arms]
        new_tokens = max(self.answer_limit(data.dataset, data.max_new_tokens) for data in self.loaded)
        memory = memory_of(*devices_in_use(self.spec))
        return fitting_batch(self.config.batch_size, self.spec, methods, self.max_prompt_tokens, new_tokens, memory)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What must agree for two visits to share a folder."""
        from eval.run.identity import identity_of

        return identity_of(self)

    @cached_property
    def about(self) -> dict[str, Any]:
        """Config and provenance, for run.json."""
        from eval.run.identity import provenance_of

        return {
            "config": asdict(replace(self.config, shard=None)),
            "provenance": provenance_of(self),
            "examples": {data.dataset.name: data.total for data in self.loaded},  # `limit` chooses from these
        }

    @property
    def name(self) -> str:
        """What it compares, for people: the label, or the method."""
        others = {name_of(settings["name"]) for label, settings in self.asked.items() if label != self.baseline}
        return self.config.label or ("comparison" if len(others) > 1 else min(others, default="baseline"))

    @property
    def data_name(self) -> str:
        """The data, for people: a dataset, a task or a suite, or the number of datasets, and a suite's own subset."""
        return self._name_of_datasets + (f"_{self.data.subset}" if self.data.subset else "")

    @property
    def _name_of_datasets(self) -> str:
        tasks = {dataset.task for dataset in self.datasets}
        if len(self.datasets) == 1:
            return self.datasets[0].name
        if len(tasks) == 1:
            return min(tasks)
        if len(tasks) == len(self.suite.all_tasks) or self.suite.whole in self.config.dataset:
            return self.suite.whole
        return f"{len(self.datasets)}_datasets"

    @property
    def folder(self) -> Path:
        from eval.store.folder import fingerprint

        if self.config.out is not None:
            return Path(self.config.out)
        model = self.config.model.name if self.is_served else Path(self.config.model.name).name
        parts = (model, self.name, self.data_name, fingerprint(self.identity)[:8])
        return RUNS / "-".join(parts).replace("/", "-")

    def changed(self, **settings: Any) -> Run:
        """The run with other settings."""
        return Run(replace(self.config, **settings))

    def check(self) -> Run:
        """Refuse what the settings, the model's files, rows at hand and servers rule out. Returns the run.

        No torch is imported for it; what takes torch to know is refused before rows are made (`identity`).
        """
        config, suite, spec = self.config, self.suite, self.spec
        check_writable(Path(config.out or RUNS))
        _ = self.chat, self.asked, self.datasets
        if config.tracker.mode == "online":
            require(config.tracker.name == "wandb", "tracker.mode", "online", "tracker=wandb with it")
            os.environ |= QUIET | os.environ
            import wandb  # not at the top: only if it is used

            has_key = wandb.login(prompt=False, verify=False)
            require(has_key, "tracker.mode", "online", "a key (wandb login, WANDB_API_KEY)")
        if not self.is_served:
            layers: int | None = read_config(spec).get("num_hidden_layers")
            for label, settings in self.asked.items():
                for other in method_asked(settings).models():
                    try:
                        read_config(other)
                    except HubError as error:
                        arm = "method" if config.compare is None else f"compare.{label}"
                        keys = [key for key, value in settings.items() if value == other.name]
                        given = f"{arm}.{keys[0]}=" if keys else f"{arm} needs "
                        raise UserError(f"{given}{error.reason}; give a folder with the checkpoint") from error
            if layers is not None:  # in a nested config transformers finds it
                for settings in self.asked.values():
                    with about_the_method():
                        method_asked(targets.with_layers(settings, layers)).tokens_per_layer(layers, 1)
        if self.is_served or spec.tokenizer is not None:  # refuse what is no tokenizer
            has_chat_template(*tokenizer_of(spec))
        if suite.rows_here or (suite.length(self.data) is None and self.data.dir is not None):
            _ = self.loaded
        _ = self.servers
        return self


def limit_of_prompts(run: Run, longest: int | None) -> int:
    """Tokens of a prompt; longer ones lose their middle. longest: the model's positions, if known. Raises UserError."""
    length, asked = run.suite.length(run.data), run.config.model.max_prompt_tokens
    if length is not None and longest is not None and length > longest:  # before the rows are made
        raise UserError(
            f"{run.datasets[0].name}: {length} tokens of prompt and answer exceed the model's {longest} positions: "
            f"{run.suite.shorter}"
        )
    limit = asked or (prompt_limit(longest) if longest is not None else length)
    if limit is None:
        raise UserError("the server does not tell how long a prompt may be: give model.max_prompt_tokens=N")
    if longest is not None and limit > longest:
        raise UserError(f"model.max_prompt_tokens={limit}: the model has {longest} positions: give fewer")
    return limit


def check_writable(folder: Path) -> None:
    """Raise UserError if a folder cannot be written, or made."""
    exists = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not exists.is_dir() or not os.access(exists, os.W_OK):
        raise UserError(f"{folder}: cannot be written ({exists}): give another with out=FOLDER, or start elsewhere")


_OF_THE_RUN = {"model", "prompt", "messages", "stream", "stream_options", "max_tokens", "stop"}  # fields of a request


def _check_servers(config: RunConfig, arms: dict[str, dict[str, Any]]) -> None:
    """Refuse what servers cannot do, and URLs that cannot be one's."""
    model, server = config.model, config.server
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
    has_own = server.api == "chat" and model.chat not in (None, "none")
    require(not has_own, "model.chat", model.chat, "none: the server applies its own template")
    one = config.load.rate is None or config.load.concurrency == 1
    require(one, "load.concurrency", config.load.concurrency, "1 with load.rate")
    require(config.trace == 0, "trace", config.trace, "0, as a server does not tell what its layers compute")
    expected = "null, as a server does not tell the probabilities that it needs"
    require(config.fidelity is None, "fidelity", config.fidelity, expected)


def _check_unused(group: str, settings: Any, instead: str) -> None:
    """Refuse settings that were changed and would change nothing."""
    for item in fields(settings):
        value = getattr(settings, item.name)
        require(value == getattr(type(settings)(), item.name), f"{group}.{item.name}", value, instead)
