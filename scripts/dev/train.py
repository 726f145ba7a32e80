"""Train the two small models that are shipped, on the CPU: `lazyllm/models/tiny` and `lazyllm/models/coder`.

    nice -n 10 python -m scripts.dev.train tiny --work FOLDER                    # train, or resume FOLDER's checkpoint
    nice -n 10 python -m scripts.dev.train coder --work FOLDER --tokens 16_000_000
    python -m scripts.dev.train coder --work FOLDER --save lazyllm/models/coder  # write the checkpoint as a model

The shipped weights were made at commit 8716cf3. Recipes and draws are the same since then, rounding is not.

Standard output is the log, a line of JSON for some steps.

tiny learns the embedded suite (`eval/benchmarks/embedded.py`). Half of the early sequences are copying (random tokens,
of which segments are repeated at varying distance), half are contexts of the suite with several questions. Contexts
start short, with few facts, keys and words; they grow when the running accuracy of the answers' first tokens, mean over
tasks, passes `ADVANCE`. The loss is on answers only. No question of the test split is asked.

coder learns Python: the standard library of the running Python and its tests, without the modules that `is_held_out`
picks, of which `eval/benchmarks/stdlib.py` has its rows. It starts as tiny with 4 more layers, whose outputs are 0 at
first, and a larger vocabulary in which every token of tiny keeps its id. Its rate falls in the last fifth of
`--tokens`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eval.benchmarks import embedded
from lazyllm.presets import PRESETS

IGNORE = -100  # the label of a token without a loss
SPECIALS = (embedded.PAD, embedded.BEGIN, embedded.END)
PAD, BEGIN = 0, 1  # their ids

TOKENS_PER_STEP, WARMUP, LOG_EVERY, SAVE_EVERY = 4096, 100, 20, 100  # the last three in steps
TOKENS = 20_000_000  # of coder's whole training, unless --tokens says otherwise

Labelled = tuple[list[int], list[int]]  # token ids, and the label of each


@dataclass
class Progress:
    """Counters of a training. loss, accuracy (of each kind): running means of some 30 steps."""

    accuracy: list[float]
    step: int = 0
    tokens: int = 0
    loss: float = 0.0
    stage: int = 0
    stage_tokens: int = 0


class Trainer(ABC):
    """Model, optimisers, random state and progress: the content of a checkpoint.

    kinds: names of the kinds of sequences. answers: those of them whose accuracy is that of each answer's first token.
    weights: of a token of each kind in the loss. peak: the learning rate. work: folder of the checkpoint.
    """

    kinds: ClassVar[tuple[str, ...]]
    answers: ClassVar[tuple[str, ...]]
    weights: ClassVar[tuple[float, ...]]
    peak: ClassVar[float]

    def __init__(self, model: Any, work: Path) -> None:
        self.model, self.work = model, work
        self.rng, self.at = random.Random(0), Progress([0.0] * len(self.kinds))
        parameters = dict(model.named_parameters())
        matrices = [p for n, p in parameters.items() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in parameters.items() if p.ndim != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [  # Muon needs torch 2.9
            torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    @abstractmethod
    def rate(self) -> float:
        """The learning rate, as a share of the peak rate."""

    @abstractmethod
    def draw(self) -> tuple[int, list[tuple[int, Labelled]], bool]:
        """A batch: its length, (number of the kind, sequence) of each row, and whether the accuracy counts it."""

    @abstractmethod
    def advance(self) -> bool:
        """Go to the next stage if it is time. Whether the training is over."""

    def update(self) -> None:
        """One step: a batch, the loss on its labels, the gradient clipped to norm 1, the running means."""
        at, (length, rows, counts) = self.at, self.draw()
        ids, labels = torch.full((len(rows), length), PAD), torch.full((len(rows), length), IGNORE)
        kinds = torch.tensor([kind for kind, _ in rows])
        for row, (_, (tokens, wanted)) in enumerate(rows):
            ids[row, : len(tokens)], labels[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(wanted)
        is_answer = torch.tensor([name in self.answers for name in self.kinds])[kinds]
        shown = (labels[:, :-1] == IGNORE) | ~is_answer[:, None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            wanted = labels[:, 1:] != IGNORE
            logits = self.model.lm_head(hidden[:, :-1][wanted]).float()
        labels, shown, kinds = labels[:, 1:][wanted], shown[wanted], kinds[:, None].expand_as(wanted)[wanted]
        weights = torch.tensor(self.weights)[kinds]
        loss = (nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.peak * min(1.0, (at.step + 1) / WARMUP) * self.rate()
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        at.loss += (loss.item() - at.loss) * (0.03 if at.step else 1.0)
        right = logits.argmax(-1) == labels
        for kind in range(len(self.kinds) if counts else 0):
            if len(chosen := right[(kinds == kind) & shown]):
                at.accuracy[kind] += (chosen.float().mean().item() - at.accuracy[kind]) * 0.03
        at.step, at.tokens, at.stage_tokens = at.step + 1, at.tokens + ids.numel(), at.stage_tokens + ids.numel()

    def save(self, path: Path) -> None:
        """Write a checkpoint, completely or not at all."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "rng": self.rng.getstate(), "at": self.at}
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def train(self, steps: int | None = None) -> None:
        """Resume the checkpoint, if there is one, and train to the end, or to step `steps`; log and save meanwhile."""
        checkpoint = self.work / "checkpoint.pt"
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=False)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.rng.setstate(state["rng"])
            self.at = state["at"]
            print(f"resumed at step {self.at.step}", flush=True)
        at = self.at
        while not self.advance() and at.step != steps:
            self.update()
            if at.step % LOG_EVERY == 0:
                shown = {"step": at.step, "tokens": at.tokens, "stage": at.stage, "loss": at.loss}
                shown |= dict(zip(self.kinds, at.accuracy, strict=True))
                print(json.dumps({name: round(value, 4) for name, value in shown.items()}), flush=True)
            if at.step % SAVE_EVERY == 0:
                self.save(checkpoint)
        self.save(checkpoint)


def byte_level_bpe(merges: Sequence[tuple[str, str]], split: Any) -> Any:
    """A lossless byte-level BPE in which each word of the suite is one token (`ignore_merges`, as in Llama 3).

    Ids: specials, 256 bytes, words, results of merges. split: the pre-tokenizer, ending in a ByteLevel one.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    written = [word.replace(" ", "\u0120") for word in embedded.vocabulary()]
    tokens = dict.fromkeys([*SPECIALS, *alphabet, *written, *(left + right for left, right in merges)])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{embedded.BEGIN} $A", special_tokens=[(embedded.BEGIN, vocabulary[embedded.BEGIN])]
    )
    return tokenizer


# ----------------------------------------------------------------------------------- tiny: model, curriculum, sequences

ADVANCE, STAGE_TOKENS = 0.9, 400_000  # accuracy, and least tokens, of a stage that ends by its accuracy


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    length: tokens of a sequence. facts, keys, values: as in `embedded.Level`. copying: share of copy sequences.
    tokens: of the stage; 0: until ADVANCE is passed, after at least STAGE_TOKENS.
    rate: share of the learning rate at its start. decay: tokens in which the full rate would fall to 0; 0: constant.
    direct: whether digest has its easier form (`direct_digest`).
    """

    length: int
    facts: int
    keys: int
    values: int
    copying: float
    tokens: int = 0
    rate: float = 1.0
    decay: int = 0
    direct: bool = False


_ALL = len(embedded.VALUES)
STAGES = (
    Stage(64, 3, 8, 16, 0.5, direct=True),
    Stage(128, 6, 8, 24, 0.5, direct=True),
    Stage(192, 8, 24, 64, 0.5, direct=True),
    Stage(256, 16, 64, 128, 0.4, direct=True),
    Stage(256, 16, 256, _ALL, 0.3, direct=True),
    Stage(512, 16, 256, _ALL, 0.2, direct=True),
    Stage(1024, 32, 256, _ALL, 0.15, direct=True),
    Stage(2048, 64, 256, _ALL, 0.1, tokens=3_104_768, decay=6_000_000, direct=True),
    Stage(128, 8, 256, _ALL, 0.1, rate=0.7),
    Stage(256, 16, 256, _ALL, 0.1, rate=0.7),
    Stage(512, 16, 256, _ALL, 0.1, rate=0.7),
    Stage(1024, 32, 256, _ALL, 0.1, rate=0.7),
    Stage(2048, 64, 256, _ALL, 0.1, tokens=600_000, rate=0.7, decay=4_571_429),
    Stage(2048, 64, 256, _ALL, 0.1, tokens=1_200_000, rate=0.57, decay=2_180_000),
)


def tiny_tokenizer() -> Any:
    """Words of the suite and the newline are single tokens, other text is bytes. No merges."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return byte_level_bpe((), split)


@cache
def token_ids() -> dict[str, int]:
    """{text of a token: id}, "\\n" for the newline, " amber" for a word."""
    vocabulary = tiny_tokenizer().get_vocab()
    return {token.replace("\u0120", " ").replace("\u010a", "\n"): i for token, i in vocabulary.items()}


def tiny_model() -> Any:
    """A randomly initialised model: 8 layers, 128 wide, 4 query heads on 2 key/value heads."""
    ids = token_ids()
    config = LlamaConfig(
        vocab_size=len(ids), hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.05, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, dtype="float32",
        pad_token_id=ids[embedded.PAD], bos_token_id=ids[embedded.BEGIN], eos_token_id=ids[embedded.END],
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def copy_sequence(rng: random.Random, length: int) -> Labelled:
    """Random tokens, then repeated segments at random distance; loss on each segment but its start."""
    size, first = len(token_ids()), len(SPECIALS)
    pool = list(range(first, size)) if rng.random() < 0.75 else rng.sample(range(first, size), 48)
    ids = [BEGIN, *rng.choices(pool, k=length // 3)]
    labels = [IGNORE] * len(ids)
    while len(ids) < length:
        span = rng.randint(4, max(8, min(32, length // 8)))
        start = rng.randrange(1, len(ids) - span)
        segment = ids[start : start + span]
        gap = rng.choices(pool, k=rng.randint(0, 4))
        ids += gap + segment
        # the first tokens only identify the segment: one token in a large pool, two in a small one
        known = 1 if len(pool) > 48 else 2
        labels += [IGNORE] * (len(gap) + known) + segment[known:]
    return ids[:length], labels[:length]


def direct_digest(rng: random.Random, level: embedded.Level) -> tuple[embedded.Tokens, list[embedded.Question]]:
    """The suite's `digest` without a second look-up: its points hold their words directly."""
    asides = max(0, level.facts // 2 - len(embedded.ORDINALS))
    values = embedded.draw_values(rng, level, [4] * (asides + len(embedded.ORDINALS)))
    marks = [" aside"] * asides
    for place, ordinal in zip(sorted(rng.sample(range(asides + 3), 3)), embedded.ORDINALS, strict=True):
        marks.insert(place, f" {ordinal}")
    needles = [[mark, *value] for mark, value in zip(marks, values, strict=True)]
    points = [needle for needle in needles if needle[0] != " aside"]
    answer = [token for point in points for token in point][1:]
    return embedded.among_filler(rng, needles, level.context), [embedded.Question([" first"], answer, points)]


def task_sequence(rng: random.Random, name: str, stage: Stage) -> Labelled:
    """A context of a task, and questions drawn with replacement until the sequence is full; loss on the answers."""
    ids = token_ids()
    before, between = embedded.head(name), embedded.tail(name)
    asked = {"digest": 24, "shots": stage.length // 3, "retrieve": stage.length // 3}.get(name, int(stage.length * 0.4))
    level = embedded.Level(stage.length - len(before) - min(asked, 240), stage.facts, stage.keys, stage.values)
    generate = direct_digest if stage.direct and name == "digest" else embedded.GENERATORS[name]
    context, questions = generate(rng, level)
    questions = [question for question in questions if not embedded.is_test(context, question)]
    sequence = [ids[token] for token in (*before, *context)]
    labels = [IGNORE] * len(sequence)
    for question in rng.choices(questions, k=24) if questions else []:
        asking = [ids[token] for token in (*between, *question.input)]
        answer = [ids[token] for token in (*question.answer, embedded.END)]
        if len(sequence) + len(asking) + len(answer) > stage.length:
            break
        sequence += [*asking, *answer]
        labels += [*[IGNORE] * len(asking), *answer]
        if name == "digest":
            break
    return sequence, labels


class TinyTrainer(Trainer):
    """The curriculum: stages go on by accuracy, or after their tokens."""

    answers = embedded.NAMES
    kinds = (*answers, "copy")
    weights, peak = (1.0,) * len(kinds), 3e-3

    def __init__(self, work: Path) -> None:
        super().__init__(tiny_model(), work)

    def rate(self) -> float:
        """The stage's, at least 2 %."""
        stage = STAGES[self.at.stage]
        return max(0.02, stage.rate - (self.at.stage_tokens / stage.decay if stage.decay else 0.0))

    def draw(self) -> tuple[int, list[tuple[int, Labelled]], bool]:
        """Of the current stage, or in one batch of four of an earlier one of the same form; tasks take turns."""
        current, stage, rng = STAGES[self.at.stage], STAGES[self.at.stage], self.rng
        earlier = [past for past in STAGES[: self.at.stage] if past.length >= 256 and past.direct == current.direct]
        if earlier and rng.random() < 0.25:
            stage = rng.choice(earlier)
        rows, tasks = list[tuple[int, Labelled]](), len(embedded.NAMES)
        offset = rng.randrange(tasks)
        for number in range(max(1, TOKENS_PER_STEP // stage.length)):
            task = (offset + number) % tasks
            if rng.random() < stage.copying:
                rows.append((tasks, copy_sequence(rng, stage.length)))
            else:
                rows.append((task, task_sequence(rng, embedded.NAMES[task], stage)))
        return stage.length, rows, stage == current

    def advance(self) -> bool:
        at, stage = self.at, STAGES[self.at.stage]
        enough = at.stage_tokens >= (stage.tokens or STAGE_TOKENS)
        if at.stage + 1 == len(STAGES):
            return enough
        tasks = at.accuracy[: len(embedded.NAMES)]
        if enough and (stage.tokens or sum(tasks) / len(tasks) >= ADVANCE):
            at.stage, at.stage_tokens, at.accuracy = at.stage + 1, 0, [value * 0.5 for value in at.accuracy]
        return False


# ---------------------------------------------------------------------------------------- coder: text, model, sequences

# Folders of the library that are left out: tests, tables of characters, other packages
NO_CODE = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "ensurepip", "__pycache__"}
MERGES = 2100  # including those that make a token of tiny
LENGTHS = (512, 1024, 2048, 4096)
SHARES = (0.74, 0.18, 0.06, 0.02)  # of the lengths while the rate is constant: short sequences cost less per token
LAST_SHARES = (0.4, 0.3, 0.2, 0.1)  # while the rate falls
KINDS = {"file": 0.38, "cross": 0.37, "tasks": 0.2, "copy": 0.05}
"""Shares of the sequences: windows of files, windows after chunks of related files, embedded tasks, copying."""
_IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)
NEW_LAYERS = (2, 5, 8, 11)  # of 12; the others are tiny's


def module_of(path: str) -> str:
    """The module of a file of the library: http for http/client.py, io for _pyio.py."""
    name = PurePosixPath(path).parts[0].removesuffix(".py")
    return name.lstrip("_").removeprefix("py") or name


def is_held_out(path: str) -> bool:
    """Whether a file's module is left out of training: 1 of 8 modules, by the hash of its name."""
    return hashlib.sha256(module_of(path).encode()).digest()[0] % 8 == 0


def related(path: str, text: str, files: Iterable[str]) -> list[str]:
    """The files related to a file: those of its package, and those of modules that it imports."""
    imported = {name.split(".")[0] for name in _IMPORT.findall(text)}
    package = PurePosixPath(path).parent
    return [
        file
        for file in files
        if file != path and (PurePosixPath(file).parent == package != PurePosixPath(".") or module_of(file) in imported)
    ]


def training_files() -> dict[str, str]:
    """{path: text} of the running Python's library, then of its tests, both without the modules held out.

    Of the library, folders in `NO_CODE` are left out; of the tests, tables (files of more than 400,000 characters).
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.glob("**/*.py"))]
    library = [name for name in files if not NO_CODE & {*name.split("/")} and "sysconfigdata" not in name]
    untouched = tuple(f"test/test_{module_of(name)}" for name in library if is_held_out(name))
    names = [name for name in library if not is_held_out(name)]
    names += [name for name in files if name.startswith("test/test_") and not name.startswith(untouched)]
    texts = {name: (folder / name).read_text(encoding="utf-8", errors="replace") for name in names}
    return {name: text for name, text in texts.items() if len(text) < 400_000 or not name.startswith("test/")}


def coder_tokenizer(texts: list[str]) -> Any:
    """tiny's tokenizer with merges learned on these texts: tiny's tokens keep their ids."""
    split = pre_tokenizers.Sequence([
        pre_tokenizers.Split("\n", "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])  # fmt: skip
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = split
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = len(alphabet) + MERGES
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    learned.train_from_iterator(texts, trainer)
    merges = [(left, right) for left, right in json.loads(learned.to_str())["model"]["merges"]]
    # two full stops in a row must stay two tokens, as in the tasks
    return byte_level_bpe([pair for pair in merges if ".." not in "".join(pair)], split)


def coder_model(vocabulary: int) -> Any:
    """tiny with four more layers whose outputs are zero, and a larger vocabulary."""
    torch.manual_seed(0)
    tiny = LlamaForCausalLM.from_pretrained(PRESETS["tiny"].source, dtype=torch.float32)
    layers = tiny.config.num_hidden_layers + len(NEW_LAYERS)
    sizes = {"vocab_size": vocabulary, "num_hidden_layers": layers, "max_position_embeddings": 8192}
    model: Any = LlamaForCausalLM(LlamaConfig.from_dict(tiny.config.to_dict() | sizes))
    old, new = tiny.model.embed_tokens.weight.data, model.model.embed_tokens.weight.data
    new.normal_().mul_(old.std(0)).add_(old.mean(0))
    new[: len(old)] = old
    model.model.norm.load_state_dict(tiny.model.norm.state_dict())
    old_layers = iter(tiny.model.layers)
    for i, layer in enumerate(model.model.layers):
        if i in NEW_LAYERS:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
        else:
            layer.load_state_dict(next(old_layers).state_dict())
    return model


class CoderTrainer(Trainer):
    """Code and tasks; the rate falls in the last fifth. The tokenizer is in `work`, made if necessary.

    Files are drawn in proportion to their tokens, the library's twice as often as its tests.
    """

    kinds, answers = tuple(KINDS), ("tasks",)
    weights, peak = (1.0, 1.0, 4.0, 4.0), 2e-3  # of a token of code, of an answer or a copy

    def __init__(self, work: Path, tokens: int = TOKENS) -> None:
        texts, path = training_files(), work / "tokenizer.json"
        if not path.exists():
            library = [text for name, text in texts.items() if not name.startswith("test/")]
            coder_tokenizer(library).save(str(path))
        tokenizer = Tokenizer.from_file(str(path))
        super().__init__(coder_model(tokenizer.get_vocab_size()), work)
        self.tokens = tokens
        encoded = tokenizer.encode_batch([*texts.values()], add_special_tokens=False)
        files = {name: code.ids for name, code in zip(texts, encoded, strict=True)}
        self.files = {name: ids for name, ids in files.items() if len(ids) > 100}
        self.related = {name: related(name, texts[name], self.files) for name in self.files}
        self.headers = {name: tokenizer.encode(f"# {name}\n", add_special_tokens=False).ids for name in self.files}
        self.newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
        self.shares = [len(ids) * (0.5 if name.startswith("test/") else 1.0) for name, ids in self.files.items()]

    def draw_file(self) -> str:
        """The name of a file."""
        return self.rng.choices([*self.files], self.shares)[0]

    def window(self, name: str, size: int) -> list[int]:
        """A header with the path, then tokens of the file from the start of a line; at most `size` tokens together."""
        ids, header = self.files[name], self.headers[name]
        room = max(1, size - len(header))
        start = self.rng.randrange(max(1, len(ids) - room + 1))
        while start and ids[start - 1] != self.newline:
            start -= 1
        return [*header, *ids[start : start + room]][:size]

    def file(self, length: int) -> Labelled:
        """A window of a file, or of several if they are short."""
        ids = [BEGIN]
        while len(ids) < length:
            ids += self.window(self.draw_file(), length - len(ids))
        return ids, ids

    def cross(self, length: int) -> Labelled:
        """Chunks of related files, then a window; each chunk is the best of four by tokens shared with the window."""
        while not self.related[name := self.draw_file()]:
            pass
        target = self.window(name, self.rng.randint(length // 3, length // 2))
        common = len(SPECIALS) + 256 + len(embedded.vocabulary())  # bytes and tiny's words, which most texts share
        wanted = {token for token in target if token >= common}
        ids = [BEGIN]
        while (room := length - len(ids) - len(target)) > 40:
            size = min(room, self.rng.randint(150, 500))
            drawn = [self.window(self.rng.choice(self.related[name]), size) for _ in range(4)]
            ids += max(drawn, key=lambda chunk: len(wanted & {*chunk}) / (len({*chunk}) + 20))
        ids = (ids + target + self.window(name, length))[:length]
        return ids, ids

    def tasks(self, length: int) -> Labelled:
        """A context of an embedded task with several questions; its loss is on the answers."""
        length = min(length, max(embedded.LENGTHS))
        stage = Stage(length, length // 32, 256, len(embedded.VALUES), 0.0)
        return task_sequence(self.rng, self.rng.choice(embedded.NAMES), stage)

    def copy(self, length: int) -> Labelled:
        """Random words of tiny, then segments of them again; its loss is on these segments."""
        return copy_sequence(self.rng, length)

    def left(self) -> float:
        """The remaining tokens / a fifth of all: below 1, the rate falls."""
        return (self.tokens - self.at.tokens) / (0.2 * self.tokens)

    def rate(self) -> float:
        """Constant, then falling to 2 %."""
        return min(1.0, max(0.02, self.left()))

    def draw(self) -> tuple[int, list[tuple[int, Labelled]], bool]:
        """Sequences of one length."""
        length = self.rng.choices(LENGTHS, SHARES if self.left() >= 1 else LAST_SHARES)[0]
        rows = max(1, TOKENS_PER_STEP // length)
        kinds = self.rng.choices(range(len(KINDS)), [*KINDS.values()], k=rows)
        return length, [(kind, getattr(self, self.kinds[kind])(length)) for kind in kinds], True

    def advance(self) -> bool:
        return self.at.tokens >= self.tokens


# --------------------------------------------------------------------------------------------------------- command line


def save(name: str, work: Path, folder: Path) -> None:
    """Write the checkpoint in `work` and its tokenizer in `from_pretrained` form: tiny in float32, coder in float16."""
    tokenizer = tiny_tokenizer() if name == "tiny" else Tokenizer.from_file(str(work / "tokenizer.json"))
    model = tiny_model() if name == "tiny" else coder_model(tokenizer.get_vocab_size()).half()
    model.load_state_dict(torch.load(work / "checkpoint.pt", weights_only=False)["model"])
    model.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=embedded.PAD, bos_token=embedded.BEGIN, eos_token=embedded.END,
        clean_up_tokenization_spaces=False, model_max_length=model.config.max_position_embeddings,
    )  # fmt: skip
    fast.save_pretrained(folder)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", choices=["tiny", "coder"])
    add("--work", type=Path, help="folder of checkpoint and log (/tmp/train_MODEL)")
    add("--tokens", type=int, default=TOKENS, help="of coder's whole training")
    add("--save", type=Path, help="write the checkpoint in --work into this folder as a model, and stop")
    args = parser.parse_args()
    work = args.work or Path(f"/tmp/train_{args.model}")
    if args.save:
        save(args.model, work, args.save)
    else:
        torch.set_num_threads(1)
        work.mkdir(parents=True, exist_ok=True)
        trainer = TinyTrainer(work) if args.model == "tiny" else CoderTrainer(work, args.tokens)
        trainer.train()


if __name__ == "__main__":
    main()
