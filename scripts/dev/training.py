"""The common part of both training scripts: a step, checkpoints to resume from, log, tokenizer, saving."""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from eval.benchmarks import embedded

IGNORE = -100
SPECIALS = (embedded.PAD, embedded.BEGIN, embedded.END)


class Trainer:
    """Model, optimisers, random state and counters: the content of a checkpoint.

    A subclass adds `update` (one step, which calls `descend`), `done`, `row` (its columns of the log), and the names of
    its counters.
    """

    counters: ClassVar[tuple[str, ...]] = ("step", "tokens", "seconds", "log")

    def __init__(self, model: Any, seed: int) -> None:
        self.model = model
        self.rng = random.Random(seed)
        parameters = dict(model.named_parameters())
        matrices = [p for n, p in parameters.items() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in parameters.items() if p.ndim != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [  # Muon needs torch 2.9
            torch.optim.Muon(matrices, lr=1.0, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.step = self.tokens = 0
        self.seconds = 0.0  # of CPU time
        self.log: list[dict[str, Any]] = []

    def update(self) -> None:
        """One step."""
        raise NotImplementedError

    def done(self) -> bool:
        """Whether the training is over."""
        raise NotImplementedError

    def row(self) -> dict[str, Any]:
        """The subclass's columns of the log."""
        raise NotImplementedError

    def logits(self, ids: Tensor, labels: Tensor, bf16: bool = True) -> tuple[Tensor, Tensor]:
        """Logits [wanted, vocabulary] before every label that is not IGNORE, and the mask of these: [b, n - 1]."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            wanted = labels[:, 1:] != IGNORE
            return self.model.lm_head(hidden[:, :-1][wanted]).float(), wanted

    def descend(self, loss: Tensor, rate: float, tokens: int) -> None:
        """Make the optimisers' step by the gradient of a loss, clipped to norm 1."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.tokens += tokens

    def save(self, path: Path) -> None:
        """Write a checkpoint, completely or not at all."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "rng": self.rng.getstate(),
            "counters": {key: getattr(self, key) for key in self.counters},
        }
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)

    def load(self, path: Path) -> None:
        """Resume a checkpoint that `save` wrote."""
        state = torch.load(path, weights_only=False)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.setstate(state["rng"])
        vars(self).update(state["counters"])

    def note(self) -> None:
        """Add a line to the log."""
        row = {"step": self.step, "tokens": self.tokens, "seconds": round(self.seconds, 1), **self.row()}
        self.log.append(row)
        print(json.dumps(row), f"{self.tokens / self.seconds:.0f} tokens/s", flush=True)

    def train(self, args: argparse.Namespace) -> None:
        """Resume the checkpoint in `args.work`, train to the end or to `args.steps`, and log and save meanwhile."""
        checkpoint = args.work / "checkpoint.pt"
        if checkpoint.exists():
            self.load(checkpoint)
            print(f"resumed at step {self.step}", flush=True)
        while not self.done() and (not args.steps or self.step < args.steps):
            started = time.process_time()
            self.update()
            self.step += 1
            self.seconds += time.process_time() - started
            if self.step % args.log_every == 0:
                self.note()
                write_rows(args.work / "log.csv", self.log)
            if self.step % args.save_every == 0:
                self.save(checkpoint)
        self.save(checkpoint)


def add_options(parser: argparse.ArgumentParser, name: str, rate: float) -> None:
    """The options of both scripts."""
    add = parser.add_argument
    add("--work", type=Path, default=Path(f"/tmp/train_{name}"), help="folder of checkpoint, log and model")
    add("--seed", type=int, default=0)
    add("--steps", type=int, default=0, help="stop after this step (0: at the end)")
    add("--threads", type=int, default=1)
    add("--lr", type=float, default=rate)
    add("--warmup", type=int, default=100, help="steps")
    add("--tokens-per-step", type=int, default=4096)
    add("--log-every", type=int, default=20)
    add("--save-every", type=int, default=100)


def byte_level_bpe(words: Sequence[str], merges: Sequence[tuple[str, str]], split: Any) -> Any:
    """A lossless byte-level BPE in which a pre-token that is a word is one token (`ignore_merges`, as in Llama 3).

    Ids: specials, 256 bytes, words, results of merges. split: the pre-tokenizer, ending in a ByteLevel one.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    written = [word.replace(" ", "\u0120") for word in words]
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


def save_model(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write model (which changes its dtype) and tokenizer in `from_pretrained` form."""
    from transformers import PreTrainedTokenizerFast

    model.to(dtype).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=embedded.PAD,
        bos_token=embedded.BEGIN,
        eos_token=embedded.END,
        clean_up_tokenization_spaces=False,
        model_max_length=model.config.max_position_embeddings,
    )
    fast.save_pretrained(folder)
    # transformers 5 writes the name of a new class; this one exists in every version
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
