"""Train the two small models that are shipped, on the CPU: `lazyllm/models/tiny` and `lazyllm/models/coder`.

    nice -n 10 python -m scripts.dev.train tiny --work FOLDER
    nice -n 10 python -m scripts.dev.train coder --work FOLDER

Each takes about 47 minutes; then the model is in FOLDER/model. Data and recipes: the MODEL_CARD.md of each. Shapes and
tokenizers are the shipped models'. Their weights were made at commit 8716cf3: recipes and draws are the same since
then, rounding is not.
"""

import argparse
import hashlib
import json
import math
import random
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eval.benchmarks import embedded
from lazyllm.presets import PRESETS

IGNORE = -100  # the label of a token without a loss
SPECIALS, PAD, BEGIN = 3, 0, 1  # the number of special tokens, and ids of two
TINY, CODER = PRESETS["tiny"].source, PRESETS["coder"].source  # folders
_VOCABULARY = Tokenizer.from_file(f"{TINY}/tokenizer.json").get_vocab()
# {text of a token of tiny: id}, "\n" for the newline, " amber" for a word
IDS = {token.replace("\u0120", " ").replace("\u010a", "\n"): i for token, i in _VOCABULARY.items()}
TOKENS_PER_STEP, WARMUP, SHOW_EVERY = 4096, 100, 100  # the last two in steps

Labelled = tuple[list[int], list[int]]  # token ids, and the label of each
# A sequence, the weight of its tokens in the loss, and the task whose accuracy counts its answers' first tokens, or -1
Row = tuple[Labelled, float, int]
Batch = tuple[int, float, list[Row]]  # of one step: the length that rows are padded to, the share of the peak rate


class Trainer:
    """Model, optimisers, random state, counters, and running means of some 30 steps: the loss, tiny's accuracy by task.

    shipped: the folder of the shipped model, whose tokenizer is used. batches: of the whole training.
    """

    batches: Callable[[], Iterator[Batch]]

    def __init__(self, model: Any, shipped: str, peak_rate: float) -> None:
        self.model, self.peak_rate, self.rng = model, peak_rate, random.Random(0)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(shipped)
        self.step, self.tokens, self.loss, self.accuracy = 0, 0, 0.0, list[float]()
        parameters = dict(model.named_parameters())
        matrices = [p for n, p in parameters.items() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in parameters.items() if p.ndim != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [  # Muon needs torch 2.9
            torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def update(self, length: int, rate: float, drawn: list[Row]) -> None:
        """One step: the loss on the labels, the gradient clipped to norm 1, the running means."""
        sequences, weight_of, task_of = zip(*drawn, strict=True)
        ids = torch.full((len(drawn), length), PAD)
        labels = torch.full_like(ids, IGNORE)
        for row, (tokens, wanted) in enumerate(sequences):
            ids[row, : len(tokens)], labels[row, : len(tokens)] = torch.tensor(tokens), torch.tensor(wanted)
        is_wanted = labels[:, 1:] != IGNORE
        rows, is_first = is_wanted.nonzero()[:, 0], (labels[:, :-1] == IGNORE)[is_wanted]
        labels, weights, tasks = labels[:, 1:][is_wanted], torch.tensor(weight_of)[rows], torch.tensor(task_of)[rows]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[:, :-1][is_wanted]).float()
        loss = (nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()
        self.model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.peak_rate * min(1.0, (self.step + 1) / WARMUP) * rate
            optimizer.step()
        self.loss += (loss.item() - self.loss) * (0.03 if self.step else 1.0)
        right = logits.argmax(-1) == labels
        for task, accuracy in enumerate(self.accuracy):
            if len(chosen := right[is_first & (tasks == task)]):
                self.accuracy[task] += (chosen.float().mean().item() - accuracy) * 0.03
        self.step, self.tokens = self.step + 1, self.tokens + ids.numel()

    def train(self, folder: Path) -> None:
        """Train, and write the model, in the shipped one's type, and its tokenizer, in `from_pretrained` form."""
        for length, rate, drawn in self.batches():
            self.update(length, rate, drawn)
            if self.step % SHOW_EVERY == 0:
                shown = {"step": self.step, "tokens": self.tokens, "length": length, "loss": self.loss}
                print(json.dumps(shown | {"accuracy": self.accuracy}), flush=True)
        self.model.to(self.model.config.dtype).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


ADVANCE, STAGE_TOKENS = 0.9, 400_000  # accuracy, and least tokens, of a stage that ends by its accuracy


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum. facts, keys, values: as in `embedded.Level`."""

    length: int  # tokens of a sequence
    facts: int
    keys: int = 256
    values: int = len(embedded.VALUES)
    copying: float = 0.1  # share of copy sequences
    tokens: int = 0  # of the stage; 0: until ADVANCE is passed, after at least STAGE_TOKENS
    rate: float = 1.0  # share of the peak learning rate at its start
    decay: float = math.inf  # tokens in which the full rate would fall to 0
    direct: bool = False  # whether digest has its easier form (`direct_digest`)


STAGES = (
    Stage(64, 3, 8, 16, 0.5, direct=True),
    Stage(128, 6, 8, 24, 0.5, direct=True),
    Stage(192, 8, 24, 64, 0.5, direct=True),
    Stage(256, 16, 64, 128, 0.4, direct=True),
    Stage(256, 16, copying=0.3, direct=True),
    Stage(512, 16, copying=0.2, direct=True),
    Stage(1024, 32, copying=0.15, direct=True),
    Stage(2048, 64, tokens=3_104_768, decay=6_000_000, direct=True),
    Stage(128, 8, rate=0.7),
    Stage(256, 16, rate=0.7),
    Stage(512, 16, rate=0.7),
    Stage(1024, 32, rate=0.7),
    Stage(2048, 64, tokens=600_000, rate=0.7, decay=4_571_429),
    Stage(2048, 64, tokens=1_200_000, rate=0.57, decay=2_180_000),
)


def copy_sequence(rng: random.Random, length: int) -> Labelled:
    """Random tokens, then repeated segments at random distance; loss on each segment but its start."""
    tokens = range(SPECIALS, len(IDS))
    pool = tokens if rng.random() < 0.75 else rng.sample(tokens, 48)
    known = 1 if pool is tokens else 2  # first tokens of a segment, which only identify it: more in a small pool
    ids = [BEGIN, *rng.choices(pool, k=length // 3)]
    labels = [IGNORE] * len(ids)
    while len(ids) < length:
        span = rng.randint(4, max(8, min(32, length // 8)))
        start = rng.randrange(1, len(ids) - span)
        segment = ids[start : start + span]
        gap = rng.choices(pool, k=rng.randint(0, 4))
        ids += gap + segment
        labels += [IGNORE] * (len(gap) + known) + segment[known:]
    return ids[:length], labels[:length]


def direct_digest(rng: random.Random, level: embedded.Level) -> tuple[embedded.Tokens, list[embedded.Question]]:
    """The suite's `digest` without a second look-up: its points hold their words directly."""
    values = embedded.draw_values(rng, level, [4] * max(len(embedded.ORDINALS), level.facts // 2))
    needles = [[" aside", *value] for value in values]
    places = sorted(rng.sample(range(len(needles)), len(embedded.ORDINALS)))
    for place, ordinal in zip(places, embedded.ORDINALS, strict=True):
        needles[place][0] = f" {ordinal}"
    points = [needles[place] for place in places]
    answer = [token for point in points for token in point][1:]
    return embedded.among_filler(rng, needles, level.context), [embedded.Question([" first"], answer, points)]


def task_sequence(rng: random.Random, name: str, stage: Stage) -> Labelled:
    """A context of a task, and questions drawn with replacement until the sequence is full; loss on the answers."""
    before, between = embedded.head(name), embedded.tail(name)
    asked = {"digest": 24, "shots": stage.length // 3, "retrieve": stage.length // 3}.get(name, int(stage.length * 0.4))
    level = embedded.Level(stage.length - len(before) - min(asked, 240), stage.facts, stage.keys, stage.values)
    generate = direct_digest if stage.direct and name == "digest" else embedded.GENERATORS[name]
    context, questions = generate(rng, level)
    questions = [question for question in questions if not embedded.is_test(context, question)]
    sequence = [IDS[token] for token in (*before, *context)]
    labels = [IGNORE] * len(sequence)
    for question in rng.choices(questions, k=24) if questions else []:
        asking = [IDS[token] for token in (*between, *question.input)]
        answer = [IDS[token] for token in (*question.answer, embedded.END)]
        if len(sequence) + len(asking) + len(answer) > stage.length:
            break
        sequence += [*asking, *answer]
        labels += [*[IGNORE] * len(asking), *answer]
        if name == "digest":
            break
    return sequence, labels


class TinyTrainer(Trainer):
    """The curriculum."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(LlamaForCausalLM(LlamaConfig.from_pretrained(TINY)), TINY, 3e-3)
        self.accuracy = [0.0] * len(embedded.NAMES)

    def batches(self) -> Iterator[Batch]:
        """Each stage's in turn; one in four is of an earlier stage of the same form. Tasks take turns."""
        rng, tasks = self.rng, len(embedded.NAMES)
        for number, current in enumerate(STAGES):
            earlier = [s for s in STAGES[:number] if s.length >= 256 and s.direct == current.direct]
            began = self.tokens
            while (done := self.tokens - began) < (current.tokens or STAGE_TOKENS) or not (
                current.tokens or sum(self.accuracy) / tasks >= ADVANCE
            ):
                stage = rng.choice(earlier) if earlier and rng.random() < 0.25 else current
                rows, offset = list[Row](), rng.randrange(tasks)
                for place in range(max(1, TOKENS_PER_STEP // stage.length)):
                    task = (offset + place) % tasks
                    if rng.random() < stage.copying:
                        rows.append((copy_sequence(rng, stage.length), 1.0, -1))
                    else:
                        sequence = task_sequence(rng, embedded.NAMES[task], stage)
                        rows.append((sequence, 1.0, task if stage == current else -1))
                yield stage.length, max(0.02, current.rate - done / current.decay), rows
            self.accuracy = [value * 0.5 for value in self.accuracy]


# Folders of the library that are left out: tests, tables of characters, other packages
NO_CODE = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "ensurepip", "__pycache__"}
CODER_TOKENS = 16_000_000  # of the whole training
LENGTHS = (512, 1024, 2048, 4096)
SHARES = (0.74, 0.18, 0.06, 0.02)  # of the lengths while the rate is constant: short sequences cost less per token
LAST_SHARES = (0.4, 0.3, 0.2, 0.1)  # while the rate falls
# Of the sequences: windows of files, windows after chunks of related files, embedded tasks, copying
KINDS = {"file": 0.38, "cross": 0.37, "tasks": 0.2, "copy": 0.05}


def module_of(path: str) -> str:
    """The module of a file of the library: http for http/client.py, io for _pyio.py."""
    name = path.split("/")[0].removesuffix(".py")
    return name.lstrip("_").removeprefix("py") or name


def is_held_out(path: str) -> bool:
    """Whether a file's module is left out of training: 1 of 8 modules, by the hash of its name."""
    return hashlib.sha256(module_of(path).encode()).digest()[0] % 8 == 0


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


def coder_model() -> Any:
    """tiny with four more layers whose outputs are zero, and a larger vocabulary."""
    torch.manual_seed(0)
    tiny = LlamaForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model: Any = LlamaForCausalLM(LlamaConfig.from_pretrained(CODER))
    old, new = tiny.model.embed_tokens.weight.data, model.model.embed_tokens.weight.data
    new.normal_().mul_(old.std(0)).add_(old.mean(0))
    new[: len(old)] = old
    model.model.norm.load_state_dict(tiny.model.norm.state_dict())
    for number, layer in enumerate(tiny.model.layers):
        model.model.layers[number * 3 // 2].load_state_dict(layer.state_dict())
    for layer in model.model.layers[2::3]:  # a new one after every two
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    return model


class CoderTrainer(Trainer):
    """Code and tasks."""

    def __init__(self) -> None:
        super().__init__(coder_model(), CODER, 2e-3)
        texts = training_files()
        encoded = self.tokenizer([*texts.values()], add_special_tokens=False, verbose=False).input_ids
        self.files = {name: ids for name, ids in zip(texts, encoded, strict=True) if len(ids) > 100}
        self.related = dict[str, list[str]]()  # the others of a file's package, and those of modules that it imports
        for name in self.files:
            package, others = name.rpartition("/")[0], [other for other in self.files if other != name]
            used = {*re.findall(r"^\s*(?:from|import)\s+(\w+)", texts[name], re.MULTILINE)}
            self.related[name] = [
                other for other in others if other.rpartition("/")[0] == package != "" or module_of(other) in used
            ]
        self.shares = [len(ids) * (0.5 if name.startswith("test/") else 1.0) for name, ids in self.files.items()]

    def draw_file(self) -> str:
        """The name of a file, in proportion to their tokens; the library's twice as often as its tests'."""
        return self.rng.choices([*self.files], self.shares)[0]

    def window(self, name: str, size: int) -> list[int]:
        """A header with the path, then tokens of the file from the start of a line; at most `size` tokens together."""
        ids, newline = self.files[name], IDS["\n"]
        header = self.tokenizer(f"# {name}\n", add_special_tokens=False).input_ids
        room = max(1, size - len(header))
        start = self.rng.randrange(max(1, len(ids) - room + 1))
        while start and ids[start - 1] != newline:
            start -= 1
        return [*header, *ids[start : start + room]][:size]

    def cross(self, length: int) -> list[int]:
        """Chunks of related files, then a window; each chunk is the best of four by tokens shared with the window."""
        while not self.related[name := self.draw_file()]:
            pass
        target = self.window(name, self.rng.randint(length // 3, length // 2))
        wanted = {token for token in target if token >= len(IDS)}  # tiny's tokens are in most texts
        ids = [BEGIN]
        while (room := length - len(ids) - len(target)) > 40:
            size = min(room, self.rng.randint(150, 500))
            drawn = [self.window(self.rng.choice(self.related[name]), size) for _ in range(4)]
            ids += max(drawn, key=lambda chunk: len(wanted & {*chunk}) / (len({*chunk}) + 20))
        return (ids + target + self.window(name, length))[:length]

    def sequence(self, kind: str, length: int) -> Labelled:
        """A sequence of one of `KINDS`. The loss is on all tokens of code, else on answers or repeated segments."""
        if kind == "copy":
            return copy_sequence(self.rng, length)
        if kind == "tasks":
            length = min(length, max(embedded.LENGTHS))
            return task_sequence(self.rng, self.rng.choice(embedded.NAMES), Stage(length, length // 32))
        ids = self.cross(length) if kind == "cross" else [BEGIN]
        while len(ids) < length:
            ids += self.window(self.draw_file(), length - len(ids))
        return ids, ids

    def batches(self) -> Iterator[Batch]:
        """Sequences of one length. In the last fifth, the rate falls to 2 %, and more of them are long."""
        while self.tokens < CODER_TOKENS:
            left = (CODER_TOKENS - self.tokens) / (0.2 * CODER_TOKENS)  # below 1, the rate falls
            length = self.rng.choices(LENGTHS, SHARES if left >= 1 else LAST_SHARES)[0]
            kinds = self.rng.choices([*KINDS], [*KINDS.values()], k=max(1, TOKENS_PER_STEP // length))
            rows = [(self.sequence(kind, length), 4.0 if kind in ("tasks", "copy") else 1.0, -1) for kind in kinds]
            yield length, min(1.0, max(0.02, left)), rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["tiny", "coder"])
    parser.add_argument("--work", type=Path, help="folder of the model (/tmp/train_MODEL)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    trainer = TinyTrainer() if args.model == "tiny" else CoderTrainer()
    trainer.train((args.work or Path(f"/tmp/train_{args.model}")) / "model")


if __name__ == "__main__":
    main()
