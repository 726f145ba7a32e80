"""Train the deeper Llama of `lazyllm/models/coder` on the CPU: real Python source, and the embedded suite's tasks.

    nice -n 5 python -m scripts.dev.train_coder --work FOLDER --tokens 20_000_000    # resumes FOLDER's checkpoint
    python -m scripts.dev.train_coder --work FOLDER --save lazyllm/models/coder      # write the checkpoint as a model
    python -m scripts.dev.train_coder --work FOLDER --figure results/coder           # draw the log
    python -m scripts.dev.train_coder --held-out eval/benchmarks/stdlib_held_out.json.xz   # write the suite's files

The model starts as tiny with 4 more layers, whose outputs are 0 at first, and a larger vocabulary in which every token
of tiny keeps its id: it can find and copy from the start, and learns code. The text is the standard library of the
running Python and its tests, without the modules that `eval.benchmarks.stdlib.is_held_out` picks.

The rate is constant until the last fifth of `--tokens`, in which it falls. To train longer, copy `before_fall.pt` over
`checkpoint.pt` and call again with more `--tokens`.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import random
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eval.benchmarks import embedded, stdlib
from lazyllm.presets import PRESETS
from scripts.dev.train_tiny import Stage, copy_sequence, task_sequence
from scripts.dev.training import IGNORE, SPECIALS, Trainer, add_options, byte_level_bpe, save_model, write_rows

# Folders of the library that are left out: tests, tables of characters, other packages
NO_CODE = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "ensurepip", "__pycache__"}
MERGES = 2100  # including those that make a token of tiny
BEGIN_ID = SPECIALS.index(embedded.BEGIN)
PAD_ID = SPECIALS.index(embedded.PAD)
LENGTHS = (512, 1024, 2048, 4096)
SHARES = (0.74, 0.18, 0.06, 0.02)  # of the lengths while the rate is constant: short sequences cost less per token
LAST_SHARES = (0.4, 0.3, 0.2, 0.1)  # while the rate falls
KINDS = {"file": 0.38, "cross": 0.37, "tasks": 0.2, "copy": 0.05}
"""Shares of the sequences: windows of files, windows after chunks of related files, embedded tasks, copying."""
ANSWER_WEIGHT = 4.0  # loss weight of a token of an answer or a copy; a token of code has 1
BLOCK = 128  # queries in a block of attention
NEW_LAYERS = (2, 5, 8, 11)  # of 12; the others are tiny's


# Text.


def library_files() -> dict[str, str]:
    """Every file of the running Python's library, without `NO_CODE`, by its path in the library's folder."""
    names = [name for name in _names() if not NO_CODE & {*name.split("/")} and "sysconfigdata" not in name]
    return {name: _read(name) for name in names}


def test_files(modules: set[str]) -> dict[str, str]:
    """The library's tests of other modules than these, without tables (files of more than 400,000 characters)."""
    untouched = tuple(f"test/test_{module}" for module in modules)
    names = [name for name in _names() if name.startswith("test/test_") and not name.startswith(untouched)]
    return {name: text for name in names if len(text := _read(name)) < 400_000}


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _names() -> list[str]:
    return [path.relative_to(_library()).as_posix() for path in sorted(_library().rglob("*.py"))]


def _read(name: str) -> str:
    return (_library() / name).read_text(encoding="utf-8", errors="replace")


def build_tokenizer(texts: list[str]) -> Any:
    """tiny's tokenizer with merges learned on these texts: tiny's tokens keep their ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    split = pre_tokenizers.Sequence([
        pre_tokenizers.Split("\n", "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ])  # fmt: skip
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = split
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES, initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    learned.train_from_iterator(texts, trainer)
    # two full stops in a row must stay two tokens, as in the tasks
    merges = [
        (left, right) for left, right in json.loads(learned.to_str())["model"]["merges"] if ".." not in left + right
    ]
    return byte_level_bpe(embedded.vocabulary(), merges, split)


# Model.


def block_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any):
    """Causal attention in blocks of queries: in training on a CPU, twice as fast as torch's own.

    query: [b, h, n, d]; key, value: [b, kv, n, d]. Returns [b, n, h, d].
    """
    (b, h, n, d), kv = query.shape, key.shape[1]
    future = torch.full((BLOCK, BLOCK), float("-inf"), dtype=query.dtype).triu(1)
    keys, values = (part.reshape(b * kv, n, d).split(BLOCK, 1) for part in (key, value))
    blocks = []
    for i, asked in enumerate((query * scaling).reshape(b * kv, h // kv, n, d).split(BLOCK, 2)):
        rows = asked.shape[2]
        past = torch.zeros(rows, i * BLOCK, dtype=query.dtype)
        bias = torch.cat([past, future[:rows, :rows]], 1).repeat(h // kv, 1)
        seen = torch.cat(keys[: i + 1], 1).transpose(1, 2)
        weights = torch.baddbmm(bias, asked.reshape(b * kv, -1, d), seen).softmax(-1)
        blocks.append(torch.bmm(weights, torch.cat(values[: i + 1], 1)).view(b * kv, h // kv, rows, d))
    return torch.cat(blocks, 2).view(b, h, n, d).transpose(1, 2).contiguous(), None


def build_model(vocabulary: int, seed: int) -> Any:
    """tiny with four more layers whose outputs are zero, and a larger vocabulary."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    AttentionInterface.register("blocks", block_attention)
    torch.manual_seed(seed)
    tiny = LlamaForCausalLM.from_pretrained(PRESETS["tiny"].source, dtype=torch.float32)
    layers = tiny.config.num_hidden_layers + len(NEW_LAYERS)
    sizes = {"vocab_size": vocabulary, "num_hidden_layers": layers, "max_position_embeddings": 8192}
    model: Any = LlamaForCausalLM(LlamaConfig.from_dict(tiny.config.to_dict() | sizes))
    model.set_attn_implementation("blocks")
    old, new = tiny.model.embed_tokens.weight.data, model.model.embed_tokens.weight.data
    new.normal_().mul_(old.std(0)).add_(old.mean(0))
    new[: len(old)] = old
    model.model.norm.load_state_dict(tiny.model.norm.state_dict())
    own = iter(tiny.model.layers)
    for i, layer in enumerate(model.model.layers):
        if i in NEW_LAYERS:
            layer.self_attn.o_proj.weight.data.zero_()
            layer.mlp.down_proj.weight.data.zero_()
        else:
            layer.load_state_dict(next(own).state_dict())
    return model


# Sequences. ids and labels are lists of the same length; labels are IGNORE for tokens without a loss.


class Sequences:
    """Draws sequences of each kind in KINDS.

    Files are drawn in proportion to their tokens, the library's twice as often as its tests.
    """

    def __init__(self, tokenizer: Any, texts: dict[str, str], rng: random.Random) -> None:
        encoded = tokenizer.encode_batch([*texts.values()], add_special_tokens=False)
        files = {name: code.ids for name, code in zip(texts, encoded, strict=True)}
        self.files = {name: ids for name, ids in files.items() if len(ids) > 100}
        self.related = {name: stdlib.related(name, texts[name], self.files) for name in self.files}
        self.headers = {
            name: tokenizer.encode(stdlib.header(name), add_special_tokens=False).ids for name in self.files
        }
        self.newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
        self.names = list(self.files)
        self.weights = [len(ids) * (0.5 if name.startswith("test/") else 1.0) for name, ids in self.files.items()]
        self.rng = rng

    def draw(self) -> str:
        """The name of a file."""
        return self.rng.choices(self.names, self.weights)[0]

    def window(self, name: str, size: int) -> list[int]:
        """A header with the path, then tokens of the file from the start of a line; at most `size` tokens together."""
        ids, header = self.files[name], self.headers[name]
        room = max(1, size - len(header))
        start = self.rng.randrange(max(1, len(ids) - room + 1))
        while start and ids[start - 1] != self.newline:
            start -= 1
        return [*header, *ids[start : start + room]][:size]

    def file(self, length: int) -> tuple[list[int], list[int]]:
        """A window of a file, or of several if they are short."""
        ids = [BEGIN_ID]
        while len(ids) < length:
            ids += self.window(self.draw(), length - len(ids))
        return ids, ids

    def cross(self, length: int) -> tuple[list[int], list[int]]:
        """Chunks of related files, then a window; each chunk is the best of four by tokens shared with the window."""
        while not self.related[name := self.draw()]:
            pass
        target = self.window(name, self.rng.randint(length // 3, length // 2))
        wanted = {token for token in target if token >= self.common}
        ids = [BEGIN_ID]
        while (room := length - len(ids) - len(target)) > 40:
            size = min(room, self.rng.randint(150, 500))
            drawn = [self.window(self.rng.choice(self.related[name]), size) for _ in range(4)]
            ids += max(drawn, key=lambda chunk: len(wanted & {*chunk}) / (len({*chunk}) + 20))
        ids = (ids + target + self.window(name, length))[:length]
        return ids, ids

    @cached_property
    def common(self) -> int:
        """Ids below this one are bytes and tiny's words, which most texts share."""
        return len(SPECIALS) + 256 + len(embedded.vocabulary())

    def tasks(self, length: int) -> tuple[list[int], list[int]]:
        """A context of an embedded task with several questions; its loss is on the answers."""
        length = min(length, max(embedded.LENGTHS))
        stage = Stage(length, length // 32, 256, len(embedded.VALUES), 0.0)
        return task_sequence(self.rng, self.rng.choice(embedded.NAMES), stage)[:2]

    def copy(self, length: int) -> tuple[list[int], list[int]]:
        """Random words of tiny, then segments of them again; its loss is on these segments."""
        return copy_sequence(self.rng, length)

    def batch(self, tokens: int, shares: tuple[float, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """ids and labels [sequences, length], and each sequence's kind."""
        length = self.rng.choices(LENGTHS, shares)[0]
        kinds = self.rng.choices(range(len(KINDS)), [*KINDS.values()], k=max(1, tokens // length))
        rows = []
        for kind in kinds:
            ids, labels = getattr(self, [*KINDS][kind])(length)
            padding = length - len(ids)
            rows.append((ids + [PAD_ID] * padding, labels + [IGNORE] * padding))
        ids, labels = (torch.tensor(column) for column in zip(*rows, strict=True))
        return ids, labels, torch.tensor(kinds)


# Training.


class CoderTrainer(Trainer):
    """Adds the running mean of the loss of each kind of sequence."""

    counters = (*Trainer.counters, "means")

    def __init__(self, args: argparse.Namespace, tokenizer: Any, texts: dict[str, str]) -> None:
        super().__init__(build_model(tokenizer.get_vocab_size(), args.seed), args.seed)
        self.args = args
        self.sequences = Sequences(tokenizer, texts, self.rng)
        self.means = [0.0] * len(KINDS)

    def left(self) -> float:
        """The remaining tokens / a fifth of all: below 1, the rate falls."""
        return (self.args.tokens - self.tokens) / (0.2 * self.args.tokens)

    def rate(self) -> float:
        """Learning rate: warm-up, constant, then falling to 2 %."""
        return self.args.lr * min(1.0, (self.step + 1) / self.args.warmup, max(0.02, self.left()))

    def done(self) -> bool:
        return self.tokens >= self.args.tokens

    def update(self) -> None:
        """One step; keeps the checkpoint before the rate falls."""
        left = self.left()
        ids, labels, kinds = self.sequences.batch(self.args.tokens_per_step, SHARES if left >= 1 else LAST_SHARES)
        logits, wanted = self.logits(ids, labels)
        losses = nn.functional.cross_entropy(logits, labels[:, 1:][wanted], reduction="none")
        kind = kinds[:, None].expand_as(wanted)[wanted]
        weights = torch.where(kind >= list(KINDS).index("tasks"), ANSWER_WEIGHT, 1.0)
        self.descend((losses * weights).sum() / weights.sum(), self.rate(), ids.numel())
        for i in range(len(KINDS)):
            if len(chosen := losses[kind == i]):
                self.means[i] += (chosen.mean().item() - self.means[i]) * (0.03 if self.means[i] else 1.0)
        if left >= 1 > self.left():
            self.save(self.args.work / "before_fall.pt")

    def row(self) -> dict[str, Any]:
        means = {name: round(value, 4) for name, value in zip(KINDS, self.means, strict=True)}
        return {"lr": f"{self.rate():.3g}", **means}


def make_trainer(args: argparse.Namespace) -> CoderTrainer:
    """The trainer, with the tokenizer in `--work`, which is made if necessary."""
    from tokenizers import Tokenizer

    args.work.mkdir(parents=True, exist_ok=True)
    library = library_files()
    held_out = {stdlib.module_of(name) for name in library if stdlib.is_held_out(name)}
    texts = {name: text for name, text in library.items() if not stdlib.is_held_out(name)}
    path = args.work / "tokenizer.json"
    if not path.exists():
        build_tokenizer([*texts.values()]).save(str(path))
    return CoderTrainer(args, Tokenizer.from_file(str(path)), texts | test_files(held_out))


def train(args: argparse.Namespace) -> CoderTrainer:
    """Train to `--tokens`, or to `--steps`."""
    torch.set_num_threads(args.threads)
    trainer = make_trainer(args)
    trainer.train(args)
    return trainer


def save(work: Path, folder: Path) -> None:
    """Write the checkpoint in `work` as a model in float16."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    model = build_model(tokenizer.get_vocab_size(), seed=0)
    model.load_state_dict(torch.load(work / "checkpoint.pt", weights_only=False)["model"])
    save_model(model, tokenizer, folder, torch.float16)


def pack_held_out(file: Path) -> None:
    """Write the files of the held-out modules of the running Python, for the suite."""
    files = {name: text for name, text in library_files().items() if stdlib.is_held_out(name)}
    file.write_bytes(lzma.compress(json.dumps(files).encode(), preset=9 | lzma.PRESET_EXTREME))


def draw(log: Path, folder: Path) -> None:
    """The training figure, `training.png` and `training.svg`: loss of each kind against tokens seen."""
    import matplotlib
    from matplotlib.figure import Figure

    with log.open() as opened:
        rows = list(csv.DictReader(opened))
    matplotlib.rcParams["svg.hashsalt"] = "coder"
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name in KINDS:
        axes.plot([int(row["tokens"]) / 1e6 for row in rows], [float(row[name]) for row in rows], label=name)
    axes.set(xlabel="tokens seen, millions", ylabel="running loss, nats a token", yscale="log")
    axes.set_title("Training of lazyllm/models/coder, by kind of sequence", fontsize="medium")
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "training.png", dpi=120)
    figure.savefig(folder / "training.svg", metadata={"Date": None})
    write_rows(folder / "log.csv", rows)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "coder", rate=2e-3)
    add = parser.add_argument
    add("--tokens", type=int, default=20_000_000, help="tokens of the whole training")
    add("--save", type=Path, help="write the checkpoint in --work into this folder as a model, and stop")
    add("--figure", type=Path, help="draw the log in --work into this folder, and stop")
    add("--held-out", type=Path, help="write the held-out files of this Python's library into this file, and stop")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.save:
        save(args.work, args.save)
    elif args.figure:
        draw(args.work / "log.csv", args.figure)
    elif args.held_out:
        pack_held_out(args.held_out)
    else:
        train(args)


if __name__ == "__main__":
    main()
