"""Traces: an answer once more, with what visits leave out."""

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from eval.arms import Arm
from eval.benchmarks.prompts import Prompt
from eval.run.bench import Bench
from eval.store.record import compact_counts
from eval.store.trace import Trace
from lazyllm import Generation, generate
from lazyllm.engine.decoder import importance_of_layers


def traces_of(bench: Bench, prompt: Prompt, arms: Sequence[Arm]) -> Iterator[Trace]:
    """Generate once more, and keep what visits leave out. Raises RuntimeError or
    FloatingPointError.
    """
    model, tokenizer = bench.model, bench.tokenizer
    importance = importance_of_layers(model, prompt.token_ids)
    for arm in arms:
        method = bench.methods[arm.label, prompt.dataset.name]
        out = generate(model, prompt.as_input(), method, **prompt.options)
        group_layers, computed = compact_counts(out.computed)
        yield Trace(
            dataset=prompt.dataset.name,
            id=prompt.example.id,
            arm=arm.label,
            tokens=_texts_of_prompt(tokenizer, prompt),
            generated=_texts_of_answer(tokenizer, out.token_ids),
            importance=[[float(f"{value:.4g}") for value in row] for row in importance.tolist()],
            selected=_name_selections(out),
            group_layers=group_layers,
            computed=computed,
        )


def _name_selections(out: Generation) -> list[dict[int, list[int]]]:
    """Return the selections, with key 0 for tokens that were chosen before the prefill: they
    enter layer 1.
    """
    first, *later = out.selected
    is_selected_before = bool(first) and int(out.computed[0, 0]) < out.prompt_tokens
    return [{0: next(iter(first.values()))} if is_selected_before else first, *later]


def _texts_of_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[str]:
    """Each token's text: its span of the prompt if known, as decoding a single token loses the
    space before a word.
    """
    if prompt.spans is None:
        return [str(tokenizer.decode([token_id])) for token_id in prompt.token_ids]
    names: Any = tokenizer.convert_ids_to_tokens(list(prompt.token_ids))
    texts, done = [], 0
    for name, (first, stop) in zip(names, prompt.spans.tolist(), strict=True):
        texts.append(prompt.text[done:stop] if stop > first else str(name))
        done = max(done, stop)
    return texts


def _texts_of_answer(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[str]:
    """The text that each token adds to the answer; a letter of several tokens belongs to the
    last.
    """
    prefix, texts = "", []
    for end in range(1, len(token_ids) + 1):
        whole = str(tokenizer.decode(token_ids[:end]))
        unfinished = whole.endswith("\ufffd") and end < len(token_ids)
        texts.append("" if unfinished else whole[len(prefix) :])
        prefix = prefix if unfinished else whole
    return texts
