"""The real model that `make setup` installs: its baseline beside plain transformers, and the
methods' invariants.
"""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lazyllm
from lazyllm.check import invariants
from lazyllm.errors import UserError
from lazyllm.methods import METHODS
from lazyllm.presets import PRESETS
from tests.eval.official import SHARED, needs
from tests.lazyllm.methods.method_matrix import LISTED
from tests.runs import prepared

ROWS = SHARED / "minilongbench"
LIMIT, NEW_TOKENS = 400, 4
UNWRAPPED = {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}  # of pred.py
BEFORE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n"

try:
    FILE = Path(PRESETS["smollm2"].find())
except UserError as error:
    pytest.skip(f"model=smollm2: {error}", allow_module_level=True)


@cache
def plain() -> tuple[Any, Any]:
    """Model and tokenizer, as transformers itself reads the file."""
    source = {"gguf_file": FILE.name, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(FILE.parent, **source)
    return model, AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)


@cache
def ours() -> tuple[Any, Any]:
    return lazyllm.load_model("smollm2", dtype="float32", device="cpu")


def prompt_ids(dataset: str) -> list[int]:
    """The first row's prompt as LongBench's pred.py builds it, in ChatML written out by hand."""
    _, tokenizer = plain()
    row = json.loads((ROWS / f"{dataset}.jsonl").read_bytes().split(b"\n")[0])
    text = json.loads((ROWS / "config" / "dataset2prompt.json").read_text())[dataset].format(**row)
    ids = tokenizer(text).input_ids
    if len(ids) > LIMIT:
        text = "".join(
            tokenizer.decode(half, skip_special_tokens=True)
            for half in (ids[: LIMIT // 2], ids[-LIMIT // 2 :])
        )
    return tokenizer(text if dataset in UNWRAPPED else f"{BEFORE}{text}{AFTER}").input_ids


def check_rows(datasets: list[str]) -> None:
    """Compare prompts and tokens of each dataset's first row with transformers' own."""
    data = [f"data.dir={ROWS}", "limit=1", f"dataset=[{','.join(datasets)}]", "method=lazy"]
    limits = ["model=smollm2", "model.device=cpu", f"model.max_prompt_tokens={LIMIT}"]
    prompts = prepared(*limits, *data).prompts
    assert {prompt.dataset.name for prompt in prompts} == {*datasets}
    model, _ = plain()
    for prompt in prompts:
        ids, ends = prompt_ids(prompt.dataset.name), list(prompt.end_ids)
        assert list(prompt.token_ids) == ids
        settings = dict(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=ends)
        with torch.no_grad():
            tokens = model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()
        out = lazyllm.generate(ours()[0], ids, lazyllm.methods.Baseline(), NEW_TOKENS, ends)
        assert list(out.token_ids) == tokens


@needs(ROWS)
def test_baseline_s_tokens_are_plain_transformers() -> None:
    check_rows(["hotpotqa", "lcc"])


@needs(ROWS)
@pytest.mark.slow
def test_baseline_s_tokens_are_plain_transformers_on_a_row_of_every_dataset() -> None:
    datasets = sorted(file.stem for file in ROWS.glob("*.jsonl"))
    assert len(datasets) == 16
    check_rows(datasets)


def test_it_answers_a_question() -> None:
    model, tokenizer = ours()
    ids = tokenizer(f"{BEFORE}What is the capital of France?{AFTER}").input_ids
    out = lazyllm.generate(model, ids, lazyllm.methods.Baseline(), 20)
    assert (
        tokenizer.decode(out.token_ids, skip_special_tokens=True)
        == "The capital of France is Paris."
    )


@pytest.mark.parametrize(
    "method",
    [lazyllm.methods.Lazy({9: 0.5, 19: 0.5}), lazyllm.methods.StaticPruning(9, 0.5)],
    ids=repr,
)
def test_methods_keep_their_invariants_on_it(method: Any) -> None:
    model, tokenizer = ours()
    ids = tokenizer(Path(__file__).read_text(encoding="utf-8")).input_ids[:120]
    for invariant in (invariants.counts_what_it_computes, invariants.has_no_state):
        invariant(model, method, ids)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_method_answers_on_its_weights_as_a_folder_in_every_dtype(
    dtype: str, tmp_path: Path
) -> None:
    """As the hub has them, in bfloat16: the first tokens of the vocabulary have outlier
    activations there.
    """
    original, tokenizer = plain()
    theirs = copy.deepcopy(original).to(getattr(torch, dtype)).eval()
    theirs.hf_quantizer = None  # of GGUF files: the weights are plain numbers, which may be saved
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, _ = lazyllm.load_model(str(tmp_path), dtype=dtype, device="cpu")
    assert model.dtype == theirs.dtype
    ids = tokenizer(Path(__file__).read_text(encoding="utf-8")).input_ids[:60]
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0, -1]
    for name in METHODS:
        out = lazyllm.generate(model, ids, LISTED[name].pruning, 3, ())
        assert len(out.token_ids) == 3, name
        assert out.first_logits.dtype == theirs.dtype, name
        assert out.first_logits.isfinite().all(), name
    out = lazyllm.generate(model, ids, LISTED["baseline"].pruning, 3, ())
    assert (out.first_logits - expected).abs().max() <= 0.05 * expected.abs().max()
