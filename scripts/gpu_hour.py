"""The parts of scripts/first_gpu_hour.sh: exactness, waits and memory on the device, then times at true shapes.

Each part is a process of its own, killed after nine minutes, and writes one JSON file; `summary.md` shows all files.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from lazyllm.bench import HEADINGS, BenchCase, Pair, Run, cells_of, row, run_alone
from lazyllm.bench import main as bench
from lazyllm.engine.decoder import open_decoder
from lazyllm.engine.generation import generate
from lazyllm.engine.inputs import Prompt
from lazyllm.machine import device_name
from lazyllm.measuring import attention_events
from lazyllm.methods import Baseline, make
from lazyllm.models.load import as_device, random_weights
from lazyllm.presets import fields_of
from lazyllm.spec import ModelSpec

PART_S = 540  # of a part; machines that are lent by the call often end one after ten minutes

_TINY = "layers=4,width=64,heads=4,kv_heads=2"
_FIELD = ["--field", "--speedups", "1.5", "2", "--repeats", "3", "--warmup", "1"]
_ALONE = ["--repeats", "3", "--warmup", "1", "--against", "hf"]
# {part: arguments of `lazyllm-bench bench`}, the most wanted first
PARTS: dict[str, list[str]] = {
    "llama2": ["--shape", "llama2", "--tokens", "3500", "--new-tokens", "17", *_FIELD],
    "xgen": ["--shape", "xgen", "--tokens", "7500", "--new-tokens", "17", *_FIELD],
    "llama2_hf": ["--shape", "llama2", "--tokens", "1000", "3500", "--new-tokens", "33", "--method", "paper", *_ALONE],
    "llama3.1-8b": ["--shape", "llama3.1-8b", "--tokens", "4000", "32000", "--new-tokens", "9", *_FIELD],
    "qwen3-8b": ["--shape", "qwen3-8b", "--tokens", "4000", "32000", "--new-tokens", "9", *_FIELD],
    "long": ["--shape", "llama3.1-8b", "--tokens", "128000", "--new-tokens", "2", "--method", "paper", *_ALONE],
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts that OUT lacks. Returns 1 if one failed."""
    out, wanted = Path(arguments[0]), arguments[1:] or ["checks", *PARTS]
    failed = []
    for part in wanted:
        file = out / f"{part}.json"
        if file.is_file():
            continue
        print(f"--- {part}", flush=True)
        partial = file.with_suffix(".partial")
        command = [sys.executable, "-c", f"from scripts.gpu_hour import run_part; run_part({part!r}, {str(partial)!r})"]
        try:
            subprocess.run(command, check=True, timeout=PART_S, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"})
            partial.replace(file)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{part}: {error}", flush=True)  # what it had measured stays in the partial file
            failed.append(part)
    (out / "summary.md").write_text("\n".join(summary(out)) + "\n", encoding="utf-8")
    print((out / "summary.md").read_text(encoding="utf-8"))
    return int(bool(failed))


def run_part(part: str, file: str) -> None:
    """Measure one part and write its file."""
    if part == "checks":
        Path(file).write_text(json.dumps(checks(), indent=1) + "\n", encoding="utf-8")
        return
    tiny = f"--shape {_TINY} --tokens 60 --new-tokens 3 --repeats 1 --warmup 0".split()  # the last of an option counts
    bench([*PARTS[part], *(tiny if os.environ.get("SHAPES") == "tiny" else []), "--json", file])


def checks() -> dict[str, Any]:
    """What only a device can show: results as on the CPU, no waits in prefill, the attention kernel, memory."""
    device = as_device("auto")
    shape = _TINY if os.environ.get("SHAPES") == "tiny" else "layers=8,width=512,heads=8,kv_heads=4"
    fields: dict[str, Any] = fields_of(shape) | {"max_position_embeddings": 4096}
    config = AutoConfig.for_model(**fields)
    prompt = torch.randint(0, config.vocab_size, (600,), generator=torch.Generator().manual_seed(0))
    methods = {"baseline": Baseline(), "lazy": make("lazy", {"schedule": {1: 0.6, 3: 0.5}})}
    methods |= {name: make(name, {"layer": 2, "keep": 0.5}) for name in ("static_pruning", "fastkv", "gemfilter")}
    about: dict[str, Any] = {
        "device": device_name(device),
        "capability": torch.cuda.get_device_capability() if device.type == "cuda" else None,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
        "results": {},
    }
    exact = random_weights(config, ModelSpec(shape, "dummy", "float64", "cpu")).eval()
    for name, method in methods.items():
        expected = generate(exact, prompt, method, 4, ())
        found: dict[str, Any] = {}
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):  # the last one is used below
            model: Any = copy.deepcopy(exact)
            model.to(device, dtype)
            got = generate(model, prompt, method, 4, ())
            error = (got.first_logits.double().cpu() - expected.first_logits).abs().max().item()
            found[str(dtype)] = {
                "largest_error_of_first_logits": error,
                "same_tokens": got.token_ids == expected.token_ids,
                "same_counts": bool((got.computed[0] == expected.computed[0]).all()),
            }
        if device.type == "cuda":
            found["waits_in_prefill"] = _waits(model, prompt, method)
            _, found["peak_bytes"] = run_alone(model, method, prompt, 2)
        found["kernels"] = attention_events(partial(generate, model, prompt, method, 1, ()))
        about["results"][name] = found
    return about


def _waits(model: Any, prompt: Any, method: Any) -> int:
    """How often the host waits for the device between the prompt's arrival there and the first logits."""
    with torch.inference_mode(), open_decoder(model) as decoder:
        method.prepare(model)
        on_device = prompt.to(decoder.device)
        for mode in ("default", "warn"):  # the first prefill warms up
            session = method.start(decoder, Prompt(prompt), 2)
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode(mode)
                session.prefill(on_device)
                torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def summary(out: Path) -> Iterator[str]:
    """Each file's checks, or its cases in the table of `lazyllm-bench bench`."""
    yield "# The first hour on a GPU: random weights, time only"
    for file in sorted(out.glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        yield f"\n## {file.stem}: {data['device']}\n"
        if "cases" not in data:
            yield from (f"- {name}: {json.dumps(found)}" for name, found in data["results"].items())
            continue
        yield f"{data['settings']['shape']}, {data['settings']['dtype']}\n\n{row(HEADINGS)}"
        yield row("---:" for _ in HEADINGS)
        for case in data["cases"]:
            pairs = [Pair(*(Run(**pair[side]) for side in ("baseline", "other"))) for pair in case["pairs"]]
            yield row(cells_of(BenchCase(**case | {"pairs": pairs})))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
