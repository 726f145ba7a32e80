"""Every method on one virtual GPU: python -m tests.virtual_card [all] prints what happened, as
JSON.

The stand-in is `../shared/tools/virtual_cuda.py`: data on a CPU, devices as on CUDA. It stays
registered with torch until the process ends, so tests run this file as a process of its own. The
same process makes some mistakes, too, which must be found.
"""

import copy
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

import lazyllm
from eval.cli import main as lazyllm_bench
from lazyllm.engine import attention, kernels, masks
from lazyllm.engine.decoder import Decoder, open_decoder
from lazyllm.engine.inputs import Prompt
from lazyllm.methods import Method
from lazyllm.methods.support import bases, lazy_session
from tests.lazyllm.methods.method_matrix import LISTED
from tests.reference import attention_of, random_variant

TOOL = Path(__file__).resolve().parents[2] / "shared" / "tools" / "virtual_cuda.py"
# Variants of `tests.reference`. All methods run on the first one in bfloat16; a few on it in
# float32, and on the others
VARIANTS = (
    "llama",
    "mistral, window",
    "qwen3",
    "phi3, LongRoPE and window",
    "gemma2",
    "gemma3",
    "granite",
    "qwen2",
)
FEW = ("baseline", "lazy", "fastkv", "pyramidinfer")
METHODS: dict[str, Method] = {name: row.pruning for name, row in LISTED.items()}
PROMPT = torch.randint(3, 97, (41,), generator=torch.Generator().manual_seed(41))
NEW_TOKENS = 5
COMMANDS = (
    "run method=lazy batch_size=4 limit=2 warmup=0",
    "run method=lazy fidelity=answer trace=1 limit=1",
    "run method=specprefill limit=1 warmup=0",
    "run experiment=speed random.length=[60] random.new_tokens=3 random.repeats=1 warmup=0",
    "check lazy",
    "plan model=tiny method=lazy limit=2",
)


def card() -> Any:
    """The stand-in's module."""
    spec = importlib.util.spec_from_file_location("virtual_cuda", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["virtual_cuda"] = module
    spec.loader.exec_module(module)
    module.functions = partial(_with_elements, module, module.functions)
    module.dispatch = partial(_with_sums, module, module.dispatch)
    # a wait is of the line before these wrappers
    module._HIDDEN = (*module._HIDDEN, str(Path(__file__).resolve()))
    return module


def _with_elements(
    card: Any, functions: Callable[..., Any], func: Any, args: Any, kwargs: Any
) -> Any:
    """The stand-in's `functions`; also, `tensor[3] = 1.0` is a wait, as on an H200, and
    `tensor[3:4] = 1.0` is none.
    """
    if (
        func is torch.Tensor.__setitem__
        and isinstance(args[0], card.OnCuda)
        and isinstance(args[2], float | int)
    ):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if len(index) == args[0].ndim and all(isinstance(part, int) for part in index):
            card.MACHINE.wait("h2d", "a number into one element")
    return functions(func, args, kwargs)


def _with_sums(card: Any, dispatch: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
    """The stand-in's `dispatch`; also CUDA's two kernels that return log-sum-exps, and what they
    ask of inputs.
    """
    attend: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if func is torch.ops.aten._scaled_dot_product_flash_attention.default:
        # defaults are left out
        (query, key, value), (_, is_causal) = (args[:3], (*args[3:5], 0.0, False)[:2])
        scale = kwargs["scale"]
        assert query.element_size() == 2
        assert query.shape[2] == key.shape[2] or not is_causal, (
            "CUDA aligns the last query with the last key"
        )
        shape = tuple(query.shape), tuple(key.shape), None
        card.MACHINE.attention[
            "flash", "flash", shape, is_causal, True, str(query.dtype)[6:], card.where()[0]
        ] += 1
        card.MACHINE.launches["sdpa"] += 1
        with card._quiet():
            out, sums = attend(query.elem, key.elem, value.elem, is_causal=is_causal, scale=scale)
        return (
            card.OnCuda(out),
            card.OnCuda(sums),
            None,
            None,
            query.shape[2],
            key.shape[2],
            None,
            None,
            None,
        )
    if func is not torch.ops.aten._scaled_dot_product_efficient_attention.default:
        return dispatch(func, args, kwargs)
    query, key, value, mask = args[:4]
    assert query.shape[:2] == key.shape[:2] == value.shape[:2] == mask.shape[:2]
    assert mask.shape[2:] == (query.shape[2], key.shape[2])
    assert all(stride % 8 == 0 for stride in mask.stride()[:3]), (
        f"a mask with strides {mask.stride()} is not aligned"
    )
    assert mask.elem.isfinite().all() or key.shape[0] == 1, "a chunk may hide all keys"
    shape = tuple(query.shape), tuple(key.shape), (tuple(mask.shape), str(mask.dtype)[6:])
    card.MACHINE.attention[
        "efficient", "efficient", shape, False, False, str(query.dtype)[6:], card.where()[0]
    ] += 1
    card.MACHINE.launches["sdpa"] += 1
    with card._quiet():
        out, sums = attend(
            query.elem, key.elem, value.elem, attn_mask=mask.elem, scale=kwargs["scale"]
        )
        sums = torch.nn.functional.pad(sums, (0, -sums.shape[2] % 32), value=float("inf"))
    return card.OnCuda(out), card.OnCuda(sums), None, None


def answers_of(model: Any, method: Method) -> Iterator[Any]:
    """What must be as without the card: an answer, and a batch."""
    yield lazyllm.generate(model, PROMPT, method, NEW_TOKENS, ())
    if method.can_batch:
        many = dict(
            lazyllm.generate_many(
                model, [PROMPT, PROMPT[:30], PROMPT[:20]], method, 4, (), batch_size=2
            )
        )
        yield from (many[index] for index in range(3))
    ids = PROMPT[None].to(model.device)
    options: dict[str, Any] = {
        "do_sample": True,
        "top_k": 20,
        "repetition_penalty": 1.2,
        "min_new_tokens": 2,
    }
    with lazyllm.using(model, method):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **options)


def parts_of(
    noted: Callable[[str], AbstractContextManager[None]], model: Any, method: Method
) -> None:
    """Run the scoring before the prefill, the prefill, and each step, each within `noted` of its
    name.
    """
    with torch.inference_mode(), open_decoder(model) as decoder:
        method.prepare(model)
        on_device = PROMPT.to(decoder.device)
        with noted("start"):
            session = method.start(decoder, Prompt(PROMPT), NEW_TOKENS)
        with noted("prefill"):
            session.prefill(on_device)
        for step in range(NEW_TOKENS - 1):
            with noted(f"step {step + 1}"):
                session.step(torch.full((1,), 7 + step, device=decoder.device))


def parts_on(card: Any, model: Any, method: Method) -> dict[str, Any]:
    """Of each part: waits, launches, backends, and the precision of scores."""
    found: dict[str, Any] = {}
    precisions, baddbmm = set[Any](), torch.baddbmm

    def scores(*arguments: Any, **keywords: Any) -> torch.Tensor:
        precisions.add(torch.backends.cuda.matmul.fp32_precision)
        return baddbmm(*arguments, **keywords)

    @contextmanager
    def noted(part: str) -> Iterator[None]:
        card.MACHINE.reset()
        precisions.clear()
        with patch.object(torch, "baddbmm", scores):
            yield
        machine, calls = card.MACHINE, Counter[str]()
        for (a100, h100, shape, *_), number in machine.attention.items():
            what = "" if not shape[2] else " mask" if shape[1][0] == 1 else " mask, chunks"
            calls[f"{a100} {h100}{what}"] += number
        waits = Counter(f"{operator} in {line}" for _, operator, line, _ in machine.waits)
        launches = sum(machine.launches.values())
        found[part] = {
            "waits": waits,
            "launches": launches,
            "attention": calls,
            "scores": [*precisions],
        }

    parts_of(noted, model, method)
    return found


def compare_answers(model: Any, method: Method, expected: Iterable[Any]) -> None:
    """Raise AssertionError if the model on the card does not answer as expected."""
    for number, (answer, reference) in enumerate(
        zip(answers_of(model, method), expected, strict=True)
    ):
        for field in ("token_ids", "selected", "kv_bytes", "aux_bytes"):
            assert getattr(answer, field) == getattr(reference, field), (
                f"answer {number}: {field} differs"
            )
        assert (answer.computed == reference.computed).all(), f"answer {number}: computed differs"


def run_methods(
    card: Any, variant: str, dtype: str, names: Iterable[str], compare: bool = True
) -> dict[str, Any]:
    """{"variant, dtype: method": its parts, or what failed}. compare: also the answers with
    those on the CPU.
    """
    found = {}
    on_cpu: Any = random_variant(
        variant, 3, attention_of(variant), getattr(torch, dtype), hidden_size=64
    )
    for name in names:
        method, what = METHODS[name], f"{variant}, {dtype}: {name}"
        expected = [*answers_of(on_cpu, method)] if compare else []
        try:
            with card.virtual_cuda():
                model = copy.deepcopy(on_cpu).to("cuda")
                if compare:
                    compare_answers(model, method, expected)
                found[what] = parts_on(card, model, method)
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}"
    return found


def run_commands(card: Any) -> dict[str, str]:
    """{command: "", or the end of what it printed when it failed}."""
    found = {}
    for command in COMMANDS:
        words, printed = command.split(), StringIO()
        with TemporaryDirectory() as folder, redirect_stdout(printed), redirect_stderr(printed):
            if words[0] == "run":
                rows = [] if "experiment=speed" in words else ["dataset=lookup"]
                words += ["model=tiny", "model.device=cuda", *rows, f"out={folder}"]
            with card.virtual_cuda():
                code = lazyllm_bench(words)
        found[command] = "" if code == 0 else f"{code} {printed.getvalue()[-800:]}"
    return found


@contextmanager
def wrong_device() -> Iterator[None]:
    """Positions of a step's tokens stay on the host."""
    embed: Callable[..., Any] = Decoder.embed

    def on_host(self: Decoder, token_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return embed(self, token_ids, positions.cpu())

    with patch.object(Decoder, "embed", on_host):
        yield


@contextmanager
def _before_choices(act: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """`act` gets the scores whenever the prompt's tokens are chosen."""

    def best(scores: torch.Tensor, keep: int) -> Any:
        act(scores)
        return best_of_prompt(scores, keep)

    best_of_prompt = bases.best_of_prompt
    with (
        patch.object(bases, "best_of_prompt", best),
        patch.object(lazy_session, "best_of_prompt", best),
    ):
        yield


def wait_in_prefill() -> AbstractContextManager[None]:
    """A score is read while the prompt's tokens are chosen."""
    return _before_choices(lambda scores: scores[0].item())


@contextmanager
def mask_in_step() -> Iterator[None]:
    """A query that attends to all tokens gets a mask that says so."""

    class Masked(masks.AttentionMask):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.sees_all = False

        def visible(self, rows: slice, keys: slice) -> torch.Tensor:
            return torch.ones(
                1, keys.stop - keys.start, dtype=torch.bool, device=self._positions.device
            )

    with (
        patch.object(attention, "AttentionMask", Masked),
        patch.object(kernels, "COPIES", frozenset()),
    ):
        yield


def number_in_prefill() -> AbstractContextManager[None]:
    """A number is put in one element of the scores."""
    return _before_choices(lambda scores: scores.__setitem__(-1, float("inf")))


MUTATIONS = {
    mutation.__name__: mutation
    for mutation in (wrong_device, wait_in_prefill, number_in_prefill, mask_in_step)
}


def main(what: str = "quick") -> None:
    torch.set_num_threads(1)
    machine = card()
    found: dict[str, Any] = {"selftest": machine.selftest(), "mutations": {}}
    # as on a GPU with a cuDNN that torch prefers on Hopper
    with (
        patch("torch.backends.cudnn.is_available", lambda: True),
        patch("torch.backends.cudnn.version", lambda: 91900),
    ):
        methods = run_methods(machine, "llama", "bfloat16", METHODS)
        methods |= run_methods(machine, "llama", "float32", FEW)
        for variant in VARIANTS[1:] if what == "all" else ():
            for dtype in ("bfloat16", "float32"):
                methods |= run_methods(machine, variant, dtype, FEW)
        lazy = [name for name in METHODS if name.startswith("lazy")]
        with patch.object(kernels, "CHUNK_KEYS", 4):  # as at prompts of 8,000 tokens and more
            chunks = run_methods(machine, "llama", "bfloat16", lazy, compare=False)
            # 16 bits round otherwise than without chunks; with more, the methods' answers are the
            # same
            with patch.object(attention, "gives_lse", lambda *_: True):
                chunks |= run_methods(machine, "llama", "float32", lazy)
        found |= {"methods": methods, "chunks": chunks, "commands": run_commands(machine)}
        for name, mutation in MUTATIONS.items():
            with mutation():
                found["mutations"][name] = run_methods(
                    machine, "llama", "bfloat16", ["baseline", "lazy"], compare=False
                )
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
