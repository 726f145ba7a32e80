"""Train the tiny Llama of `lazyllm/models/tiny` on the CPU, for the embedded suite (`eval/benchmarks/embedded.py`).

    nice -n 10 python -m scripts.dev.train_tiny                           # train, or resume the checkpoint in --work
    python -m scripts.dev.train_tiny --evaluate lazyllm/models/tiny       # score a saved model on the test split
    python -m scripts.dev.train_tiny --figure results/tiny                # draw the log

Half of the early sequences are copying (random tokens, of which segments are repeated at varying distance), half are
contexts of the suite with several questions. Contexts start short, with few facts, keys and words. They grow when the
running accuracy of the answers' first tokens, mean over tasks, passes `ADVANCE`. The loss is on answers only. The
curriculum depends on the seed only. No question of the test split is asked.
"""

from __future__ import annotations

import argparse
import csv
import random
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eval.benchmarks import embedded
from scripts.dev.training import IGNORE, Trainer, add_options, byte_level_bpe, save_model, write_rows

COPY = "copy"
FAMILIES = (*embedded.NAMES, COPY)
ADVANCE = 0.9


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum.

    length: tokens of a sequence. facts, keys, values: as in `embedded.Level`. copying: share of copy sequences.
    tokens: of the stage; 0: until ADVANCE is passed (and at least `--stage-tokens`).
    rate: share of the learning rate at its start. decay: tokens in which the full rate would fall to 0; 0: constant.
    direct: whether digest has its easier form (`embedded.WARM_UP`).
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


def build_tokenizer() -> Any:
    """The tiny tokenizer: words of the suite and the newline are single tokens, other text is bytes. No merges."""
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return byte_level_bpe(embedded.vocabulary(), (), split)


@cache
def token_ids() -> dict[str, int]:
    """{text of a token: id}, "\\n" for the newline, " amber" for a word."""
    vocabulary = build_tokenizer().get_vocab()
    return {token.replace("\u0120", " ").replace("\u010a", "\n"): i for token, i in vocabulary.items()}


def build_config() -> Any:
    """The tiny model's configuration: 8 layers, 128 wide, 4 query heads on 2 key/value heads."""
    from transformers import LlamaConfig

    ids = token_ids()
    return LlamaConfig(
        vocab_size=len(ids),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        pad_token_id=ids[embedded.PAD],
        bos_token_id=ids[embedded.BEGIN],
        eos_token_id=ids[embedded.END],
        dtype="float32",
    )


def build_model(seed: int) -> Any:
    """A randomly initialised tiny model."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(build_config())


# Sequences. ids and labels are lists of the same length; labels are IGNORE for tokens without a loss.


def copy_sequence(rng: random.Random, length: int) -> tuple[list[int], list[int]]:
    """Random tokens, then repeated segments at random distance; loss on each segment but its start."""
    size, first = len(token_ids()), 3  # the specials come first
    pool = list(range(first, size)) if rng.random() < 0.75 else rng.sample(range(first, size), 48)
    ids = [token_ids()[embedded.BEGIN], *rng.choices(pool, k=length // 3)]
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


def task_sequence(rng: random.Random, name: str, stage: Stage) -> tuple[list[int], list[int], list[int]]:
    """A context of a task, and questions drawn with replacement until the sequence is full; loss on the answers.

    Returns ids, labels, and the positions of each question's first answer token.
    """
    ids = token_ids()
    before, between = embedded.head(name), embedded.tail(name)
    asked = {"digest": 24, "shots": stage.length // 3, "retrieve": stage.length // 3}.get(name, int(stage.length * 0.4))
    asked = min(asked, 240)
    level = embedded.Level(stage.length - len(before) - asked, stage.facts, stage.keys, stage.values)
    generators = embedded.WARM_UP if stage.direct else embedded.GENERATORS
    context, questions = generators[name](rng, level)
    questions = [question for question in questions if not embedded.is_test(context, question)]
    tokens = [*before, *context]
    answers: list[tuple[int, int]] = []
    for question in rng.choices(questions, k=24) if questions else []:
        asking = [*between, *question.input]
        stop = len(tokens) + len(asking) + len(question.answer) + 1
        if stop > stage.length:
            break
        tokens += [*asking, *question.answer, embedded.END]
        answers.append((stop - len(question.answer) - 1, stop))
        if name == "digest":
            break
    sequence = [ids[token] for token in tokens]
    labels = [IGNORE] * len(sequence)
    for start, stop in answers:
        labels[start:stop] = sequence[start:stop]
    padding = stage.length - len(sequence)
    return sequence + [ids[embedded.PAD]] * padding, labels + [IGNORE] * padding, [start for start, _ in answers]


@dataclass
class Batch:
    """ids, labels: [batch, length]. family: index into FAMILIES. first: whether a label is an answer's first token."""

    ids: Tensor
    labels: Tensor
    family: Tensor
    first: Tensor


def make_batch(rng: random.Random, stage: Stage, tokens: int) -> Batch:
    """A batch of about `tokens` tokens."""
    count = max(1, tokens // stage.length)
    all_ids, all_labels, families = [], [], []
    first = torch.zeros(count, stage.length, dtype=torch.bool)
    offset = rng.randrange(len(embedded.NAMES))
    for i in range(count):
        if rng.random() < stage.copying:
            ids, labels = copy_sequence(rng, stage.length)
            families.append(len(FAMILIES) - 1)
            first[i] = torch.tensor(labels) != IGNORE
        else:
            family = (offset + i) % len(embedded.NAMES)
            ids, labels, starts = task_sequence(rng, FAMILIES[family], stage)
            families.append(family)
            first[i, starts] = True
        all_ids.append(ids)
        all_labels.append(labels)
    family = torch.tensor(families)[:, None].expand(count, stage.length)
    return Batch(torch.tensor(all_ids), torch.tensor(all_labels), family, first)


def pick_stage(rng: random.Random, number: int) -> Stage:
    """The stage of a batch: the current one, or in one batch of four an earlier one of the same form."""
    current = STAGES[number]
    earlier = [stage for stage in STAGES[:number] if stage.length >= 256 and stage.direct == current.direct]
    if earlier and rng.random() < 0.25:
        return rng.choice(earlier)
    return current


# Training.


class TinyTrainer(Trainer):
    """Adds the curriculum: the stage, and each family's running accuracy."""

    counters = (*Trainer.counters, "stage", "stage_tokens", "loss", "accuracy")

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(build_model(args.seed), args.seed)
        self.args = args
        self.stage = self.stage_tokens = 0
        self.accuracy = [0.0] * len(FAMILIES)
        self.loss = 0.0

    def rate(self) -> float:
        """Learning rate: warm-up, then the stage's, at least 2 % of the full rate."""
        stage = STAGES[self.stage]
        rate = self.args.lr * min(1.0, (self.step + 1) / self.args.warmup)
        return rate * max(0.02, stage.rate - (self.stage_tokens / stage.decay if stage.decay else 0.0))

    def done(self) -> bool:
        """Whether the last stage is complete."""
        return self.stage == len(STAGES) - 1 and self.stage_tokens >= STAGES[-1].tokens

    def update(self) -> None:
        """One step: batch, loss on the answers, optimiser, running accuracies, curriculum."""
        stage = pick_stage(self.rng, self.stage)
        batch = make_batch(self.rng, stage, self.args.tokens_per_step)
        logits, wanted = self.logits(batch.ids, batch.labels, self.args.bf16)
        labels = batch.labels[:, 1:][wanted]
        loss = nn.functional.cross_entropy(logits, labels)
        self.descend(loss, self.rate(), batch.ids.numel())
        self._watch(batch, wanted, logits, labels, loss, current=stage == STAGES[self.stage])
        self.stage_tokens += batch.ids.numel()
        self._advance()

    def _watch(self, batch: Batch, wanted: Tensor, logits: Tensor, labels: Tensor, loss: Tensor, current: bool) -> None:
        """Running means (of some 30 steps) of the loss and of each family's first-token accuracy."""
        self.loss += (loss.item() - self.loss) * (0.03 if self.step else 1.0)
        if not current:
            return
        right = logits.argmax(-1) == labels
        family = batch.family[:, 1:][wanted]
        first = batch.first[:, 1:][wanted]
        for i in range(len(FAMILIES)):
            chosen = right[(family == i) & first]
            if len(chosen):
                self.accuracy[i] += (chosen.float().mean().item() - self.accuracy[i]) * 0.03

    def _advance(self) -> None:
        """Go to the next stage if this one is complete, or if the mean accuracy of the tasks passes `ADVANCE`."""
        stage = STAGES[self.stage]
        if self.stage + 1 == len(STAGES) or self.stage_tokens < (stage.tokens or self.args.stage_tokens):
            return
        tasks = self.accuracy[: len(embedded.NAMES)]
        if stage.tokens or sum(tasks) / len(tasks) >= ADVANCE:
            self.stage += 1
            self.stage_tokens = 0
            self.accuracy = [value * 0.5 for value in self.accuracy]

    def row(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "length": STAGES[self.stage].length,
            "lr": f"{self.rate():.3g}",
            "loss": round(self.loss, 4),
            **{name: round(value, 4) for name, value in zip(FAMILIES, self.accuracy, strict=True)},
        }


def train(args: argparse.Namespace) -> TinyTrainer:
    """Train to the end of the curriculum or to `--steps`, writing log, checkpoint and model as it goes."""
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    trainer = TinyTrainer(args)
    trainer.train(args)
    save_model(trainer.model, build_tokenizer(), args.work / "model")
    return trainer


# Evaluation, from disk.


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, prompts: list[list[int]], limit: int) -> list[str]:
    """Greedy answers to prompts of the same length, up to the end token."""
    ids = torch.tensor(prompts)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False)
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def evaluate(folder: Path, count: int, batch: int = 20) -> list[dict[str, Any]]:
    """Scores of a saved model on single questions of the test split, a dict for each task and prompt length.

    score: 0 to 100, by the dataset's metric. exact: % of answers that are the gold text, punctuation included.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from eval.benchmarks.datasets import DATASETS
    from eval.benchmarks.metrics import score_example

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    results = []
    for name, length in product(embedded.NAMES, embedded.LENGTHS):
        rows = [row for row in embedded.rows(name, "test", count) if embedded.token_length(row) == length]
        prompts = [tokenizer(embedded.TEMPLATES[name].format(**row)).input_ids for row in rows]
        answers: list[str] = []
        for i in range(0, len(rows), batch):
            answers += answer(model, tokenizer, prompts[i : i + batch], embedded.MAX_NEW_TOKENS[name])
        score = exact = 0.0
        for text, row in zip(answers, rows, strict=True):
            gold = row["answers"][0].strip().removeprefix("Paragraph ")
            score += score_example(DATASETS[name], text, row["answers"], row["all_classes"])
            exact += text.strip().rstrip(".;") == gold.rstrip(".;")
        shares = {"score": round(100 * score / len(rows), 2), "exact": round(100 * exact / len(rows), 2)}
        results.append({"dataset": name, "length": length, "examples": len(rows), **shares})
        print(results[-1], flush=True)
    return results


def draw(log: Path, folder: Path) -> None:
    """The training figure, `training.png` and `training.svg`: loss and first-token accuracy against tokens seen.

    The accuracies are running means that are halved when a stage begins, which causes the dips.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with log.open() as file:
        rows = list(csv.DictReader(file))
    millions = [int(row["tokens"]) / 1e6 for row in rows]
    matplotlib.rcParams["svg.hashsalt"] = "tiny"
    figure = Figure(figsize=(8, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.plot(millions, [float(row["loss"]) for row in rows], color="black")
    top.set_ylabel("loss on answers, nats")
    for name in FAMILIES:
        style = "--" if name == COPY else "-"
        bottom.plot(millions, [100 * float(row[name]) for row in rows], style, label=name, linewidth=1.2)
    bottom.set_ylabel("first token right, running %")
    bottom.set_xlabel("tokens seen, millions")
    bottom.legend(ncols=7, fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.2))
    for i in range(1, len(rows)):
        if rows[i]["stage"] != rows[i - 1]["stage"]:
            for axes in (top, bottom):
                axes.axvline(millions[i], color="0.8", zorder=0)
            top.annotate(
                f" {rows[i]['length']}", (millions[i], 1), xycoords=("data", "axes fraction"), va="top", rotation=90,
                fontsize="x-small",
            )  # fmt: skip
    title = "Training of lazyllm/models/tiny (grey: a new stage, with its sequence length in tokens)"
    top.set_title(title, fontsize="medium")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "training.png", dpi=120)
    figure.savefig(folder / "training.svg", metadata={"Date": None})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "tiny", rate=3e-3)
    add = parser.add_argument
    add("--bf16", action=argparse.BooleanOptionalAction, default=True)
    add("--stage-tokens", type=int, default=400_000, help="least tokens in a stage")
    add("--figure", type=Path, help="draw the log in --work into this folder, and stop")
    add("--evaluate", type=Path, help="score the model in this folder on the test split, and stop")
    add("--scores", type=Path, help="CSV file for the scores of --evaluate")
    add("--count", type=int, default=600, help="test rows a task for --evaluate, a third of each length")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.figure:
        draw(args.work / "log.csv", args.figure)
    elif args.evaluate:
        torch.set_num_threads(args.threads)
        results = evaluate(args.evaluate, args.count)
        if args.scores:
            write_rows(args.scores, results)
    else:
        train(args)


if __name__ == "__main__":
    main()
