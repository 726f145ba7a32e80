"""Where the time of prompt compression goes, on real contexts: segmenting, scoring, prefill. One CSV line a row.

    python -m scripts.dev.compression_time FOLDER --spacy en_core_web_sm > results/reference/cpu-compression/times.csv

FOLDER: LongBench's `<dataset>.jsonl`; the first row of each is cut to the paper's mean of 3,376 tokens, at four
characters each. The scorer has GPT-2's shape and random weights: times depend on shapes. Selective Context's released
code (liyucheng09/Selective_Context, commit 099e651) calls GPT-2 and spaCy once for each sentence; `lazyllm` calls them
once for each window of 1,024 tokens and each context. A call of GPT-2's depth at a width of 12, for 100 words, has
almost no arithmetic: its time is Python's, and a GPU does not shorten it. The last columns add these up for Llama 2 7B
on an A100, whose arithmetic takes what `lazyllm-bench plan` assumes.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from eval.run.plan import RATE, Model, seconds_on
from lazyllm.machine import ACCELERATORS
from lazyllm.methods import Baseline, RandomDrop
from lazyllm.methods.prompt_compression.scoring import scoring_flops, self_information_by
from lazyllm.methods.prompt_compression.segments import phrase_starts, sentence_starts
from lazyllm.spec import ModelSpec

TOKENS, CHARACTERS = 3376, 4  # of a prompt, and of a token


def seconds(work: Callable[[], Any]) -> float:
    """The process's CPU seconds, as the machine may have other work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def rows(folder: Path, spacy_model: str) -> Iterator[dict[str, Any]]:
    """The measured line of each dataset."""
    import spacy  # type: ignore[import-not-found]  # the extra `phrase`

    nlp = spacy.load(spacy_model, exclude=["ner", "lemmatizer"])
    gpt2, empty = (
        GPT2LMHeadModel(GPT2Config(n_embd=width, vocab_size=words, bos_token_id=0, eos_token_id=0)).eval()
        for width, words in ((768, 50257), (12, 100))
    )
    count: Any = SimpleNamespace(tokens_run=0.0)
    llama, a100 = Model.of(ModelSpec("llama2", "dummy")), ACCELERATORS["a100"]
    phrase_starts("A warm-up.", nlp)
    for file in sorted(folder.glob("*.jsonl")):
        with file.open(encoding="utf-8") as lines:
            text = " ".join(json.loads(next(lines))["context"].split())[: TOKENS * CHARACTERS]
        sentences = [text[start:stop] for start, stop in pairwise([*sentence_starts(text), len(text)])]
        ids = torch.arange(len(text) // CHARACTERS) % 50_000
        parts = [ids[: 1 + len(sentence) // CHARACTERS][None] for sentence in sentences]
        line = {
            "dataset": file.stem,
            "tokens": len(ids),
            "sentences": len(sentences),
            "segmenting_s": seconds(lambda text=text: phrase_starts(text, nlp)),
            "segmenting_by_sentence_s": seconds(lambda each=sentences: [phrase_starts(part, nlp) for part in each]),
            "scoring_s": seconds(lambda ids=ids: self_information_by(gpt2, count, ids)),
            "scoring_by_sentence_s": seconds(lambda each=parts: [gpt2(part) for part in each]),
            "empty_calls_by_sentence_s": seconds(lambda each=parts: [empty(part % 100) for part in each]),
        }
        whole, half = (seconds_on(a100, llama.prefill(method, len(ids))) for method in (Baseline(), RandomDrop(0.5)))
        arithmetic = scoring_flops(gpt2.config, len(ids), matrices=12 * 768**2) / a100.flops_per_s / RATE
        by_sentence = line["segmenting_by_sentence_s"] + line["empty_calls_by_sentence_s"] + arithmetic + half
        at_once = line["segmenting_s"] + arithmetic + half
        line |= {"a100_prefill_s": whole, "speedup_by_sentence": whole / by_sentence, "speedup": whole / at_once}
        yield {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in line.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--spacy", default="en_core_web_sm", help="spaCy's English model: a package or a folder")
    options = parser.parse_args()
    with torch.inference_mode():
        lines = list(rows(options.folder, options.spacy))
    writer = csv.DictWriter(sys.stdout, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)


if __name__ == "__main__":
    main()
