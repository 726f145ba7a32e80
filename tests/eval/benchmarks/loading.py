"""Rows of a dataset, read anew each time, and a tokenizer for whom each character is a token."""

from pathlib import Path
from typing import Any

from eval.benchmarks import SUITES
from eval.benchmarks.datasets import DATASETS
from eval.benchmarks.prompts import Prompt, build_prompt
from eval.benchmarks.suite import Dataset, DataSettings, Example, LoadedDataset

LONGBENCH = [dataset.name for dataset in SUITES["longbench"].datasets]


def load(name: str, folder: Path | None = None, **settings: Any) -> LoadedDataset:
    """The rows of a dataset; `eval.benchmarks.datasets.load` keeps what it has read."""
    dataset = DATASETS[name]
    return SUITES[dataset.suite].load(dataset, DataSettings(folder, **settings))


class Characters:
    """A tokenizer with one token per character (its code point) after BOS (1), with offsets."""

    is_fast = True
    eos_token_id = 2
    bos_token, eos_token = "\x01", "\x02"
    chat_template: str | None = None
    around = ("\x01<user>", "<model>")

    def __call__(
        self,
        text: str,
        *,
        truncation: bool,
        add_special_tokens: bool,
        verbose: bool,
        return_offsets_mapping: bool = False,
    ) -> dict[str, Any]:
        assert not truncation
        special = [1] * add_special_tokens
        tokens: dict[str, Any] = {"input_ids": special + [ord(letter) for letter in text]}
        if return_offsets_mapping:
            offsets = [(place, place + 1) for place in range(len(text))]
            tokens["offset_mapping"] = [(0, 0)] * len(special) + offsets
        return tokens

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(number) for number in ids if number > 2)

    def get_chat_template(self) -> str:
        return str(self.chat_template)

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **_: Any,
    ) -> str:
        assert (tokenize, add_generation_prompt) == (False, True)
        assert [message["role"] for message in messages] == ["user"]
        return messages[0]["content"].strip().join(self.around)


def prompt_of(
    row: Example,
    tokenizer: Any = None,
    dataset: Dataset = DATASETS["qasper"],
    **settings: Any,
) -> Prompt:
    """A row's prompt; without a tokenizer, of characters."""
    return build_prompt(row, dataset, tokenizer or Characters(), **settings)


def context_of(prompt: Prompt) -> list[str]:
    """The texts that a method may shorten."""
    return [prompt.text[start:stop] for start, stop in prompt.context]
