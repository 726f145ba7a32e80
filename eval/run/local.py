"""A run's model: what its files rule out, the arms that can be measured on it, and how it is loaded."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval.benchmarks import SUITES
from eval.benchmarks.chat_format import ChatFormat, chat_format
from eval.benchmarks.datasets import datasets_asked_for
from eval.benchmarks.suite import Dataset
from eval.run.arms import Arm, MethodAsked, check_distinct
from eval.run.settings import RunConfig
from eval.run.targets import OutOfReachError
from eval.run.work import fitting_batch
from lazyllm.engine.depth import Depth
from lazyllm.errors import UserError
from lazyllm.machine import device_name
from lazyllm.methods import Method, about_the_method
from lazyllm.models.checkpoint import HubError, read_config
from lazyllm.presets import PRESETS
from lazyllm.spec import ModelSpec

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from eval.run.bench import Bench

Load = Callable[[], "PreTrainedModel"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalModel:
    """A run's model. Made of settings: nothing heavy is imported or loaded before it is needed.

    arm_settings: {label of an arm: its settings}, the baseline first. chat: the format of prompts and answers.
    own_tokenizer: of a suite whose prompts measure time only (`Suite.tokenizer`); None for the model's.
    """

    config: RunConfig
    arm_settings: Mapping[str, dict[str, Any]]
    spec: ModelSpec
    chat: ChatFormat
    own_tokenizer: Callable[[ModelSpec], Any] | None = None

    @property
    def name(self) -> str:
        """As in folders' names."""
        return Path(self.config.model.name).name

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The models whose files the run reads, each once."""
        samples = [_sample(settings) for settings in self.arm_settings.values()]
        return tuple(dict.fromkeys([self.spec, *(spec for method in samples for spec in method.models())]))

    def check(self) -> None:
        """Refuse what files at hand rule out, without torch. Raises UserError."""
        read_config(self.spec)
        for label, settings in self.arm_settings.items():
            for other in _sample(settings).models():
                try:
                    read_config(other)
                except HubError as error:
                    arm = "method" if self.config.compare is None else f"compare.{label}"
                    keys = [key for key, value in settings.items() if value == other.name]
                    given = f"{arm}.{keys[0]}=" if keys else f"{arm} needs "
                    raise UserError(f"{given}{error.reason}; give a folder with the checkpoint") from error
        layers: int | None = read_config(self.spec).get("num_hidden_layers")
        if layers is not None:  # in a nested config transformers finds it
            for settings in self.arm_settings.values():
                depth = Depth(layers)  # without windows, which may not be in the file: what it refuses, they do too
                method = _sample(settings, depth)
                with about_the_method():
                    method.tokens_per_layer(depth, 1)

    @cached_property
    def _dtype(self) -> tuple[str, str]:
        """The dtype in which it loads, and why."""
        from lazyllm.models.dtype import choose_dtype

        return choose_dtype(self.spec, self.torch_device.type)

    @property
    def loaded_spec(self) -> ModelSpec:
        """`spec` with the dtype in which the model loads. Raises UserError if the device is absent."""
        return replace(self.spec, dtype=self._dtype[0])

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        """The model's config, after all checks that need no weights. Raises UserError."""
        from lazyllm.models.load import check_loading

        return check_loading(self.spec)

    @cached_property
    def shape(self) -> PreTrainedConfig:
        """The model's shape, which needs no files for a preset. Raises UserError."""
        from lazyllm.models.load import shape_of

        return shape_of(self.spec)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        from lazyllm.models.load import check_fits, load_tokenizer_of

        if self.own_tokenizer is not None:
            return self.own_tokenizer(self.spec)
        tokenizer = load_tokenizer_of(self.spec)
        assert tokenizer is not None  # `model_of` refuses random weights without one
        check_fits(tokenizer, self.spec)
        return tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, besides the tokenizer's own."""
        from lazyllm.models.load import load_end_ids

        return load_end_ids(self.spec)

    @property
    def positions(self) -> int:
        """Of prompt and answer together."""
        return self.model_config.max_position_embeddings

    def arms(self, datasets: Sequence[Dataset], tokens: int | None, limit: int | None) -> tuple[Arm, ...]:
        """The arms that can be measured, in order; others are left out, with a log line.

        tokens: prompt and answer, if the settings fix their length. limit: tokens of a prompt. Raises UserError.
        """
        arms, shape, column, canonical = list[Arm](), self.shape, self.config.model.paper, dict[str, dict[str, Any]]()
        depth = Depth.of(shape)
        for label, settings in self.arm_settings.items():
            try:
                with about_the_method():
                    asked = MethodAsked.of(settings, depth)
                    arms.append(asked.arm(label, datasets, shape, column, tokens, limit))
                canonical[label] = asked.canonical()
            except OutOfReachError as error:
                log.warning("left out: %s: %s", label, error)
        first = next(iter(self.arm_settings)) if self.config.baseline else None
        if not {arm.label for arm in arms} - ({first} if len(self.arm_settings) > 1 else set()):
            raise UserError("no method reaches its speedup on this model: give another")
        check_distinct(canonical)
        return tuple(arms)

    def batch_size(self, arms: Sequence[Arm], prompt_tokens: int, new_tokens: int) -> int:
        """Answers that decode together. prompt_tokens, new_tokens: the most."""
        from lazyllm.measuring import memory_of

        methods = [method for arm in arms for method in arm.methods.values()]
        memory = memory_of(self.torch_device)
        return fitting_batch(self.config.batch_size, self.loaded_spec, methods, prompt_tokens, new_tokens, memory)

    @property
    def counts_cpu_time(self) -> bool:
        """Whether times are the process's CPU time: of prompts that only measure time, by one thread of a CPU."""
        import torch

        is_cpu = self.torch_device.type == "cpu"
        return is_cpu and self.own_tokenizer is not None and (self.config.threads or torch.get_num_threads()) == 1

    @property
    def torch_device(self) -> torch.device:
        """The device that computes. Raises UserError if it is not here."""
        from lazyllm.models.load import as_device

        return as_device(self.spec.device)

    @property
    def device(self) -> str:
        """The name of what computes."""
        return device_name(self.torch_device)

    def load(self) -> PreTrainedModel:
        """The model, ready to answer. Raises as `lazyllm.load_model`."""
        from transformers.utils import logging as transformers_logging

        from lazyllm.models.load import load_weights, unapplied_settings

        log.info("loading %s in %s: %s", self.spec.name, *self._dtype)
        if unapplied := unapplied_settings(self.spec):
            settings = ", ".join(f"{key}={value}" for key, value in unapplied.items())
            log.info("answers are greedy: of the model's generation_config.json these have no effect: %s", settings)
        if not sys.stderr.isatty():
            transformers_logging.disable_progress_bar()
        return load_weights(self.loaded_spec)

    @contextmanager
    def loaded_once(self) -> Iterator[Load]:
        """A function that loads the model when it is first called. From then on until the block ends, its device is
        held."""
        from eval.run.device import held_and_released

        with ExitStack() as stack:

            @cache
            def load() -> PreTrainedModel:
                stack.enter_context(held_and_released(self.torch_device))
                stack.callback(load.cache_clear)
                return self.load()

            yield load

    @contextmanager
    def ready(
        self, arms: Sequence[Arm], baseline: str | None, batch_size: int, load: Load | None = None
    ) -> Iterator[Bench]:
        """The model, ready to answer until the block ends.

        arms: of the run, in order. baseline: the label of the one to compare with. batch_size: answers that decode
        together. load: gives the model, if several runs share it.
        """
        from eval.run.bench import Bench
        from eval.run.device import held_and_released
        from lazyllm.engine.devices import cpu_time

        with held_and_released(self.torch_device), cpu_time(self.counts_cpu_time):
            model, forces = (load or self.load)(), self.config.fidelity is not None
            yield Bench(model, self.tokenizer, self.chat, arms, baseline, batch_size, forces)


def model_of(config: RunConfig, arms: Mapping[str, dict[str, Any]]) -> LocalModel:
    """The model that the settings name. arms: {label: settings}. Raises UserError for settings that cannot be."""
    model = config.model
    keys = [setting.name for setting in fields(ModelSpec) if setting.name != "seed"]
    spec = ModelSpec(**{key: getattr(model, key) for key in keys}, seed=config.seed)
    spec.check()
    if spec.name not in PRESETS:  # of a preset, `LocalModel.check` says whether its package is here
        _ = spec.source  # refuses what is no model
    own_tokenizer = SUITES[datasets_asked_for(config.dataset, model.name)[0].suite].tokenizer
    if spec.is_dummy and spec.tokenizer is None and own_tokenizer is None and not spec.is_local:
        raise UserError(
            "random weights (model.load_format=dummy) download nothing, so the tokenizer must be given: "
            "model.tokenizer=FOLDER (with tokenizer.json or tokenizer.model) or model.tokenizer=HUB_ID"
        )
    chat = chat_format(
        model.chat if own_tokenizer is None else "none",
        args=model.chat_args or {},
        system=model.system,
        today=model.today,
        thinking_tokens=model.thinking_tokens,
    )
    for settings in arms.values():
        _sample(settings)  # refuses bad hyperparameters
    return LocalModel(config, arms, spec, chat, own_tokenizer)


def _sample(settings: dict[str, Any], depth: Depth | None = None) -> Method:
    with about_the_method():
        return MethodAsked.of(settings, depth).sample()
