"""The parts of scripts/first_gpu_hour.sh: attention by backend, rounding, commands, then times at true shapes.

Each part is a process of its own, killed after nine minutes, and writes one JSON file, case by case; `summary.md` shows
all files.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig

from lazyllm.bench import HEADINGS, case_of, cells_of, row
from lazyllm.bench import main as bench
from lazyllm.bench import parser as bench_parser
from lazyllm.engine.batch import generate_many
from lazyllm.engine.devices import read_clock
from lazyllm.engine.flops import LayerShape, prefill_flops
from lazyllm.engine.generation import generate
from lazyllm.files import write_whole
from lazyllm.integrations.transformers_generate import using
from lazyllm.machine import ACCELERATORS, LAYER_START_S, Accelerator, device_name
from lazyllm.measuring import attention_events
from lazyllm.methods import METHODS, Baseline, make
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
    """Run the parts that OUT lacks, or print a plan. Returns 1 if one failed."""
    if arguments[0] == "--plan":
        print("\n".join(plan()))
        return 0
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
    """Measure one part and write its file. Cases that the file holds are not measured again."""
    if part in PARTS:
        tiny = f"--shape {_TINY} --tokens 60 --new-tokens 3 --repeats 1 --warmup 0" if is_tiny() else ""
        bench([*PARTS[part], *tiny.split(), "--json", file])  # the last of an option counts
        return
    device = as_device("auto")
    about: dict[str, Any] = {
        "device": device_name(device),
        "capability": list(torch.cuda.get_device_capability()) if device.type == "cuda" else None,
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": sys.version.split()[0]},
    }
    held = json.loads(Path(file).read_text(encoding="utf-8")) if Path(file).is_file() else {}
    results = held.get("results", {}) if {key: held.get(key) for key in about} == about else {}
    for name, measure in CHECKS[part](device):
        if name in results:
            continue
        try:
            results[name] = measure()
        except Exception as error:  # the other cases are worth having, and the message is a finding
            results[name] = f"{type(error).__name__}: {error}"
        write_whole(Path(file), json.dumps({**about, "results": results}, indent=1) + "\n")


def is_tiny() -> bool:
    return os.environ.get("SHAPES") == "tiny"


Cases = Iterator[tuple[str, Callable[[], Any]]]  # (name, its measurement)


def attention(device: torch.device) -> Cases:
    """Seconds of attention by backend at lengths that have never run, and at one that has: a prefill's and a step's."""
    heads, k = (4, 40) if is_tiny() else (32, 4000)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

    def of_backend(backend: SDPBackend, is_prefill: bool) -> dict[str, Any]:
        found = {}
        for length in (k, k + 1, k + 2):
            sizes, times = (length if is_prefill else 1, length, length), list[float]()
            query, keys, values = (torch.rand(1, heads, size, 128, device=device, dtype=dtype) for size in sizes)
            with sdpa_kernel(backend):
                for _ in range(4):
                    began = read_clock(device)
                    scaled_dot_product_attention(query, keys, values, is_causal=is_prefill)
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


def checks(device: torch.device) -> Cases:
    """Results beside those of the CPU in float64, and the attention kernel."""
    methods = {"baseline": Baseline(), "lazy": make("lazy", {"schedule": {1: 0.6, 3: 0.5}})}
    methods |= {name: make(name, {"layer": 2, "keep": 0.5}) for name in ("static_pruning", "fastkv", "gemfilter")}
    prompt = prompt_of(600)

    def compare(name: str) -> dict[str, Any]:
        method, found = methods[name], dict[str, Any]()
        expected = generate(small_model(torch.device("cpu"), torch.float64), prompt, method, 4, ())
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):  # the last one is used below
            model = small_model(device, dtype)
            got = generate(model, prompt, method, 4, ())
            error = (got.first_logits.double().cpu() - expected.first_logits).abs().max().item()
            found[str(dtype)] = {
                "largest_error_of_first_logits": error,
                "same_tokens": got.token_ids == expected.token_ids,
                "same_counts": bool((got.computed[0] == expected.computed[0]).all()),
            }
        found["kernels"] = attention_events(partial(generate, model, prompt, method, 1, ()))
        return found

    for name in methods:
        yield name, partial(compare, name)


def together(device: torch.device) -> Cases:
    """Batches beside the same prompts one by one, and sampling."""
    model, method = small_model(device, torch.float32), make("lazy", {"schedule": {1: 0.6, 3: 0.5}})
    new_tokens = 4 if is_tiny() else 32

    def batch(rows: int, method: Any) -> dict[str, Any]:
        prompts = [prompt_of(300 + 7 * row, row) for row in range(rows)]
        began = read_clock(device)
        alone = [generate(model, prompt, method, new_tokens, ()).token_ids for prompt in prompts]
        between = read_clock(device)
        together = dict(generate_many(model, prompts, method, new_tokens, (), batch_size=rows))
        done = read_clock(device)
        same = sum(together[row].token_ids == alone[row] for row in range(rows))
        return {"same_answers": same, "one_by_one_s": between - began, "together_s": done - between}

    def sampled() -> dict[str, Any]:
        options = dict(max_new_tokens=new_tokens, do_sample=True, temperature=0.8, eos_token_id=None, pad_token_id=0)
        answers = []
        for pruned in (nullcontext(), using(model, method), using(model, method)):
            torch.manual_seed(3)
            with pruned:
                answers.append(model.generate(prompt_of(100)[None].to(device), **options)[0, 100:].tolist())
        return {"transformers": answers[0], "lazy": answers[1], "same_again": answers[1] == answers[2]}

    for rows in (8, 16):
        yield f"batch of {rows}, baseline", partial(batch, rows, Baseline())
        yield f"batch of {rows}, lazy", partial(batch, rows, method)
    yield "sampling", sampled


def commands(device: torch.device) -> Cases:
    """One `run` and one `serve`, with the bundled model, where the harness is installed."""
    if any(find_spec(package) is None for package in ("hydra", "pandas")):
        return
    command = [sys.executable, "-m", "eval.cli"]
    model = ["model=tiny", f"model.device={device.type}"]

    def run() -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            words = ["run", *model, "method=lazy", "dataset=lookup", "limit=2", f"out={folder}/run"]
            ran = subprocess.run([*command, *words], capture_output=True, text=True, timeout=PART_S)
        return {"code": ran.returncode, "says": (ran.stdout + ran.stderr)[-4000:]}

    def serve() -> dict[str, Any]:
        import httpx2  # a dependency of the harness

        words = ["serve", *model, "method=lazy", "port=0"]
        with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                url = next(line.partition(": ")[0] for line in server.stdout if line.startswith("http"))
                asked = {"model": "tiny", "prompt": "A text.", "max_tokens": 4}
                answer = httpx2.post(f"{url}/completions", json=asked, timeout=120)
                return {"seconds": answer.elapsed.total_seconds(), "answer": answer.json()}
            finally:
                server.terminate()

    yield "run", run
    if find_spec("fastapi") is not None:
        yield "serve", serve


# {part: its cases}, before the bench's
CHECKS: dict[str, Callable[[torch.device], Cases]] = {
    "sdpa": attention, "checks": checks, "together": together, "commands": commands,
}  # fmt: skip


def seconds_of(part: str, card: Accelerator) -> float:
    """A part's seconds on a card, at half of its data sheet's rates, as if no method were faster than the baseline.

    A step takes at least as long as the host needs to start its kernels.
    """
    options = bench_parser().parse_args(PARTS[part])
    config = AutoConfig.for_model(**fields_of(options.shape))
    layers, total = config.num_hidden_layers, 60.0  # a minute to load and to warm up
    weights = 2 * (layers * LayerShape.of(config).linear_flops // 2 + 2 * config.vocab_size * config.hidden_size)
    methods = (
        sum(len(options.speedups) if kind.target_parameter else 1 for kind in METHODS.values()) if options.field else 1
    )
    times = options.repeats + options.warmup
    passes = 1 + methods * (1 + 2 * times) + (3 * times if options.against else 0)
    for tokens in options.tokens:
        for new_tokens in options.new_tokens:
            prefill = prefill_flops(config, [tokens] * layers) / card.flops_per_s
            step = max(2 * weights / card.bytes_per_s, layers * LAYER_START_S)
            total += passes * (2 * prefill + (new_tokens - 1) * step)
    return total


def plan() -> Iterator[str]:
    """A table of the bench's parts: minutes by card, and a dash where the weights leave no room."""
    yield f"| part | {' | '.join(card.name for card in ACCELERATORS.values())} |"
    yield f"|---|{'---:|' * len(ACCELERATORS)}"
    for part in PARTS:
        minutes = [
            f"{seconds_of(part, card) / 60:.0f}" if card.gigabytes >= 22 and card.has_bfloat16 else "-"
            for card in ACCELERATORS.values()
        ]
        yield f"| {part} | {' | '.join(minutes)} |"
    yield f"\nMinutes at most, at half of the data sheets' rates. A part is killed after {PART_S // 60}."


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
