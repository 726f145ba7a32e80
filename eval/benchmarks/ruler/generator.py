"""RULER's rows: the same random draws in the same order as in `scripts/data/synthetic/*.py`, so the same text.

Bisection finds a prompt's number of units (sentences, words, documents). Every try draws from the generators that later
rows use, so all official tries are made here.
"""

from __future__ import annotations

import random
import re
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, pairwise
from typing import Any

from eval.benchmarks.ruler.sources import (
    Essay,
    Pairs,
    QaQuestion,
    Task,
    english_words,
    read_corpus,
    read_essay,
    words,
)
from eval.benchmarks.suite import DataSettings, DoesNotFitError, Example
from lazyllm.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."

_DEPTHS = [round(100 * step / 39) for step in range(40)]  # percent
_EXAMPLE_VALUE = "12345"
_CODE_LETTERS = 6
_SMALL = 4096  # below this length, some tasks have smaller settings
_TRIES = 100  # how often a row of the smallest size is drawn again until it fits; officially there is no limit


def rows(task: Task, tokenizer: Any, settings: DataSettings, count: int, reserved: int = 0) -> list[Example]:
    """The first `count` rows of a task.

    tokenizer: of transformers; counts tokens, special tokens not added.
    settings: their options are a `RulerConfig`.
    reserved: tokens of the length reserved for a chat template (officially `model_template_token`).

    A row's `evidence` are needles, assignments, every occurrence of a common word, or documents. Its `official` has the
    fields of a line of the official `validation.jsonl`, in order. index: for niah, the first gold answer's position in
    `input`, in characters; for other tasks, the row's number. length: tokens of input, answer prefix and answer;
    length_w_model_temp: and those reserved. token_position_answer, for niah: tokens of `input` before that answer.

    Raises UserError if the task lacks a source, has fewer rows, or the length is too short for it.
    """
    length, seed = settings.options.length, settings.options.seed
    sampler = _SAMPLERS[task.kind](task, tokenizer, settings, length - reserved)
    if isinstance(sampler, _Questions) and count > (there := len(sampler.questions)):
        raise UserError(f"{task.name} has {there} questions, but {count} rows were requested")
    size, made = sampler.size(), list[Example]()
    for number in range(count):
        draft, tokens = sampler.fitted(size, number)
        used = tokens + task.max_new_tokens
        official = {
            "index": number,
            "input": draft.input,
            "outputs": list(draft.outputs),
            "length": used,
            "length_w_model_temp": used + reserved,
            "answer_prefix": draft.answer_prefix,
        }
        if isinstance(sampler, _Needles):
            index = draft.input.find(draft.outputs[0])
            official |= {"index": index, "token_position_answer": sampler.count(draft.input[:index])}
        longest_first = sorted(draft.evidence, key=len, reverse=True)  # each stands between whitespace
        pattern = re.compile(rf"(?<!\S)(?:{'|'.join(map(re.escape, longest_first))})(?!\S)")
        start, end = draft.context
        found = (match.span() for match in pattern.finditer(draft.input, start, end))
        example = Example(
            dataset=task.name,
            id=f"{task.name}-{length}-{seed}-{number:04d}",
            instruction=draft.input[:start],
            context=draft.input[start:end],
            input=draft.input[end:],
            answers=draft.outputs,
            length=used,
            answer_prefix=draft.answer_prefix,
            evidence=tuple((first - start, last - start) for first, last in found),
            official=official,
        )
        made.append(example)
    return made


@dataclass(frozen=True)
class _Draft:
    """A prompt that may be too long. context: [start, end) of it in `input`, in which `evidence` is searched."""

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    context: tuple[int, int]
    evidence: tuple[str, ...]

    @property
    def text(self) -> str:
        """The whole prompt."""
        return self.input + self.answer_prefix

    def behind(self, example: str) -> _Draft:
        """The same prompt with a worked example in front."""
        start, end = self.context
        return replace(self, input=example + self.input, context=(start + len(example), end + len(example)))


class _Sampler(ABC):
    """Draws a task's prompts, in a size that fits. length: selects settings. budget: length minus reserved tokens."""

    step = 10  # the smallest size tried, and the decrement if a row does not fit
    smallest = 1  # the smallest size that can be drawn

    def __init__(self, task: Task, tokenizer: Any, settings: DataSettings, budget: int) -> None:
        import numpy as np

        self.task, self.tokenizer, self.settings, self.budget = task, tokenizer, settings, budget
        self.length, self.seed = settings.options.length, settings.options.seed
        self.random, self.numbers = random.Random(self.seed), np.random.RandomState(self.seed)
        self.template, self.answer_prefix = task.template, task.answer_prefix
        self.limit = budget - task.max_new_tokens  # tokens of the prompt
        self.example_tokens = 0  # tokens that `finished` puts in front
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Read the task's settings and sources, before the first draw."""

    def shuffle(self, items: list[Any]) -> None:
        """Shuffle with a new generator, seeded as the task's."""
        random.Random(self.seed).shuffle(items)

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    @abstractmethod
    def draw(self, size: int, number: int) -> _Draft:
        """A prompt of a size, for row `number`; every call makes new draws."""

    def finished(self, draft: _Draft) -> _Draft:
        """The draft as it becomes a row; it may make further draws."""
        return draft

    def upper_bound(self) -> int:
        """The largest size to try."""
        tokens = self.count(self.draw(self.step, 0).text)
        return int(self.budget / (tokens / self.step) * 3)

    def size(self) -> int:
        """The largest size that fits, by bisection from `step` to `upper_bound`; `step` if none fits."""
        low, high = self.step, max(self.upper_bound(), 2 * self.step)
        while low <= high:
            size = (low + high) // 2
            if self.count(self.draw(size, 0).text) <= self.limit - self.example_tokens:
                low = size + 1
            else:
                high = size - 1
        return max(high, self.step)

    def fitted(self, size: int, number: int) -> tuple[_Draft, int]:
        """A prompt of at most `size` that fits, and its tokens."""
        for _ in range(size // self.step + _TRIES):
            draft = self.finished(self.draw(size, number))
            tokens = self.count(draft.text)
            if tokens <= self.limit:
                return draft, tokens
            if size - self.step >= self.smallest:
                size -= self.step
        raise self.too_short()

    def too_short(self) -> UserError:
        return DoesNotFitError(
            f"ruler.length={self.length} is too short for {self.task.name}: its smallest prompt, the chat "
            f"template and {self.task.max_new_tokens} answer tokens do not fit; give a larger ruler.length"
        )

    def filled(self, context: str, evidence: Sequence[str], outputs: Sequence[str], **fields: Any) -> _Draft:
        """The template with its placeholders filled in."""
        text, prefix = (part.format(context=context, **fields) for part in (self.template, self.answer_prefix))
        start = text.index(context)
        return _Draft(text, prefix, tuple(outputs), (start, start + len(context)), tuple(evidence))


class _Needles(_Sampler):
    """niah: needles in noise, in other needles or in the sentences of a text."""

    def prepare(self) -> None:
        settings = self.task.settings
        self.key, self.value = settings["type_needle_k"], settings["type_needle_v"]
        self.values, self.queries = settings["num_needle_v"], settings["num_needle_q"]
        self.keys = max(settings["num_needle_k"], self.queries)
        self.haystack, self.essay = settings["type_haystack"], None
        if self.haystack == "essay":
            self.step, self.essay = 500, read_essay(self.task.name, self.settings)
        else:  # needles are put between lines, each at another place
            self.smallest = self.keys * self.values
            self.step = max(5 if self.length < _SMALL else 25, self.smallest)
        self.words = Pairs(*words("adjective", "noun")) if "words" in (self.key, self.value) else []
        self.kind = self.value
        if self.queries * self.values == 1:
            self.kind = self.kind[:-1]
            for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
                self.template = self.template.replace(plural, singular)
                self.answer_prefix = self.answer_prefix.replace(plural, singular)

    def draw(self, size: int, number: int) -> _Draft:
        keys, values, needles = [], [], []
        for _ in range(self.keys):
            keys.append(self._drawn(self.key))
            values.append([self._drawn(self.value) for _ in range(self.values)])
            needles.append([self._needle(keys[-1], value) for value in values[-1]])
        shuffled = [needle for group in needles for needle in group]
        self.shuffle(shuffled)
        context = self._in_lines(size, shuffled) if self.essay is None else self._in_essay(self.essay, size, shuffled)
        asked = self.random.sample(range(self.keys), self.queries)
        names = [keys[index] for index in asked]
        query = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
        outputs = [value for index in asked for value in values[index]]
        evidence = [needle for index in asked for needle in needles[index]]
        return self.filled(context, evidence, outputs, type_needle_v=self.kind, query=query)

    def _in_essay(self, essay: Essay, size: int, needles: list[str]) -> str:
        sentences = essay.sentences(size)
        depths = self.random.sample(_DEPTHS, len(needles))
        places = [0, *sorted(int(len(sentences) * (depth / 100)) for depth in depths), len(sentences)]
        parts = []
        for number, (start, end) in enumerate(pairwise(places)):
            parts += [" ".join(sentences[start:end]), *needles[number : number + 1]]
        return " ".join(parts)

    def _in_lines(self, size: int, needles: list[str]) -> str:
        if self.haystack == "needle":
            lines = [self._needle(self._drawn(self.key), self._drawn(self.value)) for _ in range(size)]
        else:
            lines = [NOISE] * size
        places = sorted(self.random.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value, key=key, value=value)

    def _drawn(self, kind: str) -> str:
        if kind == "numbers":
            return str(self.random.randint(1_000_000, 9_999_999))
        if kind == "words":
            return self.random.choice(self.words)
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))


class _Chains(_Sampler):
    """vt: chains of assignments in noise, after a worked example, made once, that gets new names in each row."""

    def prepare(self) -> None:
        self.chains, self.hops = self.task.settings["num_chains"], self.task.settings["num_hops"]
        self.step = 5 if self.length < _SMALL else 10
        sampler = _ChainsExample(self.task, self.tokenizer, self.settings, self.budget)
        sampler.random = self.random  # the example is the task's first draw
        draft, _ = sampler.fitted(sampler.size(), 0)
        self.example = f"{draft.text} {' '.join(draft.outputs)}\n"
        self.example_tokens = self.count(self.example)

    def draw(self, size: int, number: int) -> _Draft:
        return self.chained(size, [str(self.numbers.randint(10_000, 99_999)) for _ in range(self.chains)], letters=5)

    def finished(self, draft: _Draft) -> _Draft:
        example = self.example
        for name in example.split()[-self.hops - 1 :]:
            example = example.replace(name, self._name(len(name)))
        value = str(self.numbers.randint(10_000, 99_999))
        return draft.behind(f"{example.replace(_EXAMPLE_VALUE, value)}\n")

    def chained(self, size: int, values: list[str], letters: int) -> _Draft:
        """A prompt with chains that assign `values` to names of so many letters; it asks for the first chain."""
        length, names = self.hops + 1, dict[str, None]()  # distinct, in order
        while len(names) < self.chains * length:
            names[self._name(letters)] = None
        if size < length:
            raise self.too_short()
        chains = [[*names][start : start + length] for start in range(0, len(names), length)]
        lines, evidence = [NOISE] * size, list[str]()
        for chain, value in zip(chains, values, strict=True):
            assignments = [f"VAR {chain[0]} = {value}"]
            assignments += [f"VAR {name} = VAR {previous} " for previous, name in pairwise(chain)]
            places = sorted(self.random.sample(range(len(lines)), length))
            for offset, (place, assignment) in enumerate(zip(places, assignments, strict=True)):
                lines.insert(place + offset, assignment)
            evidence = evidence or [assignment.strip() for assignment in assignments]
        return self.filled("\n".join(lines), evidence, chains[0], query=values[0], num_v=length)

    def _name(self, letters: int) -> str:
        return "".join(self.random.choices(string.ascii_uppercase, k=letters))


class _ChainsExample(_Chains):
    """The worked example of vt: shorter names, a placeholder value, and at most 500 tokens without the answer."""

    def prepare(self) -> None:
        self.chains, self.hops = self.task.settings["num_chains"], self.task.settings["num_hops"]
        self.step = 5
        self.budget = self.limit = 500 - (self.length - self.budget)

    def draw(self, size: int, number: int) -> _Draft:
        return self.chained(size, [_EXAMPLE_VALUE] * self.chains, letters=3)

    def finished(self, draft: _Draft) -> _Draft:
        return draft

    def too_short(self) -> UserError:
        return DoesNotFitError(
            "vt cannot be made with this tokenizer: its worked example may have 500 tokens (chat template included), "
            "but the shortest one has more; leave vt out"
        )


class _CommonWords(_Sampler):
    """cwe: a list of words in which ten are repeated more often, after a worked example with other words."""

    def prepare(self) -> None:
        self.words = sorted({word for kind in words("noun", "adjective", "verb") for word in kind})
        self.shuffle(self.words)
        self.more_words: list[str] = []
        settings = self.task.settings
        self.common = settings["num_cw"]
        if self.length < _SMALL:
            self.repeats, self.example = (6, 1), (20, 3, 1)
        else:
            self.repeats, self.example = (settings["freq_cw"], settings["freq_ucw"]), (40, 10, 3)

    def upper_bound(self) -> int:
        tokens = self.count(self.draw(4096, 0).text)
        return int(self.budget // (tokens / 4096)) * 2

    def draw(self, size: int, number: int) -> _Draft:
        example = self._listed(*self.example)
        solution = " ".join(f"{place}. {word}" for place, word in enumerate(example.outputs, start=1))
        return self._listed(size, *self.repeats).behind(f"{example.text} {solution}\n")

    def _listed(self, size: int, common_repeats: int, other_repeats: int) -> _Draft:
        pool = self.words
        if size > len(pool):
            pool = self.more_words = self.more_words or english_words(self.settings)
        if size > len(pool):
            raise DoesNotFitError(
                f"cwe needs {size} different words at ruler.length={self.length}, but english_words.json has "
                f"{len(pool)}; give a smaller ruler.length"
            )
        drawn = self.random.sample(pool, size)
        common, others = drawn[: self.common], drawn[self.common :]
        listed = common * common_repeats + others * other_repeats
        self.shuffle(listed)
        context = " ".join(f"{place}. {word}" for place, word in enumerate(listed, start=1))
        return self.filled(context, common, common, num_cw=self.common, query="")


class _FrequentWords(_Sampler):
    """fwe: invented words with frequency rank^-`alpha`; the most frequent word is "..."."""

    def prepare(self) -> None:
        self.vocabulary_size = self.limit // 50
        self.step = self.limit // 32
        if self.step < 1 or self.vocabulary_size < 4:
            raise self.too_short()
        import numpy as np
        from scipy.special import zeta  # not at the top: it is slow to import

        alpha = self.task.settings["alpha"]  # a word's share: rank^-alpha, over the sum for all ranks
        self.weights, self.total = np.arange(1, self.vocabulary_size + 1) ** -alpha, float(zeta(alpha))

    def size(self) -> int:
        """The largest size, in steps from the first, at which the prompt is below the limit."""
        self.vocabulary = self._vocabulary()
        size = self.limit // _CODE_LETTERS
        while self.count(self.draw(size, 0).text) < self.limit:
            size += self.step
        return size - self.step

    def fitted(self, size: int, number: int) -> tuple[_Draft, int]:
        self.vocabulary = self._vocabulary()  # the same for all sizes that are tried
        return super().fitted(size, number)

    def draw(self, size: int, number: int) -> _Draft:
        counts = (size * self.weights / self.total).astype(int)
        coded = [word for word, count in zip(self.vocabulary, counts, strict=True) for _ in range(count)]
        self.shuffle(coded)
        frequent = self.vocabulary[1:4]
        return self.filled(" ".join(coded), frequent, frequent, query="")

    def _vocabulary(self) -> list[str]:
        vocabulary = set[str]()
        while len(vocabulary) < self.vocabulary_size:
            vocabulary.add("".join(self.random.choices(string.ascii_lowercase, k=_CODE_LETTERS)))
        ranked = sorted(vocabulary)
        self.shuffle(ranked)
        return ["...", *ranked[1:]]


class _Questions(_Sampler):
    """qa: a question on documents, of which some hold the answer."""

    def prepare(self) -> None:
        self.questions, self.documents = read_corpus(self.task.settings["dataset"], self.settings)

    def draw(self, size: int, number: int) -> _Draft:
        asked = self.questions[number]
        if size >= len(self.documents):
            documents = list(islice(cycle(self.documents), size))
        else:
            documents = [self.documents[index] for index in self._drawn(asked, size)]
        self.shuffle(documents)
        context = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(documents, start=1))
        evidence = [self.documents[index] for index in asked.evidence]
        return self.filled(context, evidence, asked.outputs, query=asked.text)

    def _drawn(self, asked: QaQuestion, size: int) -> list[int]:
        """The question's own documents, then others of its article, then any others."""
        missing = size - len(asked.documents)
        if missing < 0:
            raise self.too_short()
        if missing <= len(asked.more):
            return [*asked.documents, *self.random.sample(asked.more, missing)]
        own = [*asked.documents, *asked.more]
        others = sorted({*range(len(self.documents))} - {*own})
        return own + self.random.sample(others, missing - len(asked.more))


_SAMPLERS: dict[str, type[_Sampler]] = {
    "niah": _Needles,
    "variable_tracking": _Chains,
    "common_words_extraction": _CommonWords,
    "freq_words_extraction": _FrequentWords,
    "qa": _Questions,
}
