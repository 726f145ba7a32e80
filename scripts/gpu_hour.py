"""The parts of scripts/first_gpu_hour.sh: attention by backend, rounding by dtype, batches, then times at true shapes.

Each part is a process of its own, killed after nine minutes, and writes one JSON file, those of the bench case by
case; `summary.md` shows all files.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from lazyllm.bench import HEADINGS, case_of, cells_of, row
from lazyllm.bench import main as bench
from lazyllm.engine.batch import generate_many
from lazyllm.engine.devices import read_clock
from lazyllm.engine.generation import generate
from lazyllm.files import write_whole
from lazyllm.machine import device_name
from lazyllm.methods import Baseline, Method, make
from lazyllm.models.load import as_device, random_weights
from lazyllm.presets import fields_of
from lazyllm.spec import ModelSpec

PART_S = 540  # of a part; machines that are lent by the call often end one after ten minutes

_TINY = "layers=4,width=64,heads=4,kv_heads=2"
_FIELD = ["--field", "--repeats", "2", "--warmup", "0"]  # each method's run alone, for its memory, warms it up
_8B = {name: ["--shape", name, "--new-tokens", "9", *_FIELD] for name in ("llama3.1-8b", "qwen3-8b")}
# {part: arguments of `lazyllm-bench bench`}, the most wanted first
PARTS: dict[str, list[str]] = {
    "llama2": ["--shape", "llama2", "--tokens", "3500", "--new-tokens", "17", *_FIELD, "--speedups", "1.5", "2"],
    "llama2_hf": [
        *("--shape", "llama2", "--tokens", "1000", "3500", "--new-tokens", "33", "--method", "paper"),
        *("--repeats", "3", "--warmup", "1", "--against", "hf"),
    ],
    "xgen": ["--shape", "xgen", "--tokens", "7500", "--new-tokens", "17", *_FIELD, "--speedups", "1.5", "2"],
    **{f"{name}_4k": [*of, "--tokens", "4000", "--speedups", "1.5", "2"] for name, of in _8B.items()},
    **{f"{name}_32k_2x": [*of, "--tokens", "32000", "--speedups", "2"] for name, of in _8B.items()},
    **{f"{name}_32k_1.5x": [*of, "--tokens", "32000", "--speedups", "1.5"] for name, of in _8B.items()},
    "128k": [
        *("--shape", "llama3.1-8b", "--tokens", "128000", "--new-tokens", "2", "--method", "paper"),
        *("--repeats", "2", "--warmup", "0"),
    ],
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts that OUT lacks. Returns 1 if one failed."""
    out, wanted = Path(arguments[0]), arguments[1:] or [*CHECKS, *PARTS]
    failed = []
    for part in wanted:
        file = out / f"{part}.json"
        if file.is_file():
            continue
        print(f"--- {part}", flush=True)
        partial_file = file.with_suffix(".partial")
        code = f"from scripts.gpu_hour import run_part; run_part({part!r}, {str(partial_file)!r})"
        try:
            environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}
            subprocess.run([sys.executable, "-c", code], check=True, timeout=PART_S, env=environment)
            partial_file.replace(file)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{part}: {error}", flush=True)  # what it had measured stays in the partial file
            failed.append(part)
    (out / "summary.md").write_text("\n".join(summary(out)) + "\n", encoding="utf-8")
    print((out / "summary.md").read_text(encoding="utf-8"))
    return int(bool(failed))


def run_part(part: str, file: str) -> None:
    """Measure one part and write its file."""
    if part in PARTS:
        tiny = f"--shape {_TINY} --tokens 60 --new-tokens 3 --repeats 1 --warmup 0" if is_tiny() else ""
        bench([*PARTS[part], *tiny.split(), "--json", file])  # the last of an option counts
        return
    device, results = as_device("auto"), dict[str, Any]()
    for name, measure in CHECKS[part](device):
        try:
            results[name] = measure()
        except Exception as error:  # the other cases are worth having, and the message is a finding
            results[name] = f"{type(error).__name__}: {error}"
    about = {
        "device": device_name(device),
        "capability": list(torch.cuda.get_device_capability()) if device.type == "cuda" else None,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
    }
    write_whole(Path(file), json.dumps({**about, "results": results}, indent=1) + "\n")


def is_tiny() -> bool:
    return os.environ.get("SHAPES") == "tiny"


Cases = Iterator[tuple[str, Callable[[], Any]]]  # (name, its measurement)


def attention(device: torch.device) -> Cases:
    """Seconds of attention by backend at lengths that have never run, and at one that has: a prefill's and a step's."""
    heads, n = (4, 40) if is_tiny() else (32, 4000)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def of_backend(backend: SDPBackend, is_prefill: bool) -> dict[str, Any]:
        found = {}
        for length in (n, n + 1, n + 2):
            queries, times = length if is_prefill else 1, list[float]()
            sizes = (queries, length, length)
            q, k, v = (torch.rand(1, heads, size, 128, device=device, dtype=dtype) for size in sizes)
            with sdpa_kernel(backend):
                for _ in range(4):
                    began = read_clock(device)
                    scaled_dot_product_attention(q, k, v, is_causal=is_prefill)
                    times.append(read_clock(device) - began)
            found[f"k={length}"] = {"first": times[0], "later": statistics.median(times[1:])}
        return found

    names = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
    for (name, member), kind in product(names.items(), ("step", "prefill")):
        yield f"{name}, {kind}", partial(of_backend, getattr(SDPBackend, member), kind == "prefill")


def small_model(device: torch.device, dtype: torch.dtype) -> Any:
    """A model whose weights are equal in all dtypes up to rounding; RoPE's frequencies stay in float32, as loaded."""
    shape = _TINY if is_tiny() else "layers=8,width=512,heads=8,kv_heads=4"
    fields: dict[str, Any] = fields_of(shape) | {"max_position_embeddings": 4096}
    config = AutoConfig.for_model(**fields)
    exact = random_weights(config, ModelSpec(shape, "dummy", "float64", "cpu"))
    spec = ModelSpec(shape, "dummy", str(dtype).removeprefix("torch."), str(device))
    model = random_weights(config, spec).eval()
    model.load_state_dict(exact.state_dict())
    return model


def prompt_of(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1000, (n,), generator=torch.Generator().manual_seed(seed))


def rounding(device: torch.device) -> Cases:
    """Errors of the first logits by dtype, beside float64 on the CPU, and whether the tokens are the same."""
    methods = {"baseline": Baseline(), "lazy": make("lazy", {"schedule": {1: 0.6, 3: 0.5}})}
    methods |= {name: make(name, {"layer": 2, "keep": 0.5}) for name in ("static_pruning", "fastkv", "gemfilter")}
    prompt = prompt_of(600)

    def compare(method: Method) -> dict[str, Any]:
        found = {}
        expected = generate(small_model(torch.device("cpu"), torch.float64), prompt, method, 4, ())
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            got = generate(small_model(device, dtype), prompt, method, 4, ())
            error = (got.first_logits.double().cpu() - expected.first_logits).abs().max().item()
            same_tokens = got.token_ids == expected.token_ids
            found[str(dtype)] = {"largest_error_of_first_logits": error, "same_tokens": same_tokens}
        return found

    for name, method in methods.items():
        yield name, partial(compare, method)


def together(device: torch.device) -> Cases:
    """Batches beside the same prompts one by one."""
    model = small_model(device, torch.float32)
    new_tokens = 4 if is_tiny() else 32

    def batch(rows: int, method: Method) -> dict[str, Any]:
        prompts = [prompt_of(300 + 7 * row, row) for row in range(rows)]
        began = read_clock(device)
        alone = [generate(model, prompt, method, new_tokens, ()).token_ids for prompt in prompts]
        between = read_clock(device)
        together = dict(generate_many(model, prompts, method, new_tokens, (), batch_size=rows))
        done = read_clock(device)
        same = sum(together[row].token_ids == alone[row] for row in range(rows))
        return {"same_answers": same, "one_by_one_s": between - began, "together_s": done - between}

    for rows in (8, 16):
        yield f"batch of {rows}, baseline", partial(batch, rows, Baseline())
        yield f"batch of {rows}, lazy", partial(batch, rows, make("lazy", {"schedule": {1: 0.6, 3: 0.5}}))


# {part: its cases}, before the bench's
CHECKS: dict[str, Callable[[torch.device], Cases]] = {"sdpa": attention, "rounding": rounding, "together": together}


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
            yield row(cells_of(case_of(case)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
