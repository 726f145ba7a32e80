"""The bench's arithmetic by hand, and its command line end to end on tiny shapes. Times are not tested."""

import json
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

import lazyllm
from lazyllm.bench import BenchCase, Pair, Run, case_of, cells_of, in_turns, main, turn_flops
from lazyllm.engine.flops import LayerShape, prefill_flops
from lazyllm.methods import METHODS, Baseline, Lazy
from lazyllm.methods.support.hyperparameters import keep_count
from lazyllm.presets import fields_of
from tests.reference import random_model, random_variant

SHAPE = "--shape layers=4,width=64,vocab=50,mlp=64 --dtype float32 --device cpu --threads 1 --warmup 0"
# steps of 3 and 5 s revive 10 and 30 tokens, one of 2 s nothing; the baseline's steps take 2, 4 and 1 s
PAIR = Pair(
    Run([1], 8.0, [2.0, 4.0, 1.0], 15.0, 90, [0, 0, 0], 100),
    Run([1], 4.0, [3.0, 2.0, 5.0], 14.0, 30, [10, 0, 30], 60, 15),
)


def cases_of(arguments: str, file) -> dict[tuple[str, int, int, int], list[Pair]]:
    """{(name, prompt tokens, tokens of the turn, new tokens): pairs} of a call of the command."""
    main([*arguments.split(), "--json", str(file)])
    cases = map(case_of, json.loads(file.read_text())["cases"])
    return {(case.name, case.tokens, case.turn, case.new_tokens): case.pairs for case in cases}


def test_row_has_medians_and_quartiles() -> None:
    slower = Pair(PAIR.baseline, Run([1], 8.0, [3.0, 2.0, 5.0], 18.0, 30, [10, 0, 30], 60, 15))
    cells = cells_of(BenchCase("paper", 9, 0, 4, [PAIR, slower, slower], 2_000_000_000, None))
    assert cells == [
        "paper", "9", "0", "4", "8", "1 [1, 1.5]", "3", "0.3333", "-", f"{10 / 7:.4g} [1.429, 1.429]", "0.5",
        "1.2 [1.067, 1.2]", "40", "0.75", "2", "-",
    ]  # fmt: skip
    transformers = Pair(PAIR.baseline, Run([1], 9.0, [7.0], 23.0, 90, []))
    assert (transformers.step_ratio(), transformers.idle_step_ratio()) == (3.0, None)


def test_second_turn_flops_are_those_of_the_products_that_run() -> None:
    """Linear maps by PyTorch's counter; a layer's pairs by hand from the selections."""
    model, schedule = random_model("llama", 3, num_layers=5), {2: 0.5, 3: 0.6}
    text = torch.randint(0, 97, (33,), generator=torch.Generator().manual_seed(2))
    with lazyllm.start(model, text[:24], Lazy(schedule)) as session:
        first = session.answer(None, 1, ())
        with FlopCounterMode(display=False) as counter:
            second = session.answer(text[24:], 1, ())
    by_name = counter.get_flop_counts()["Global"].items()
    products = sum(flops for name, flops in by_name if str(name) in ("aten.mm", "aten.addmm", "aten.linear"))
    pairs = 2 * sum(range(25, 35))  # layers 1 and 2: the token answered at 24, and nine new ones
    for layer, layers in ((2, 1), (3, 2)):
        present, stored = second.selected[0][layer], first.selected[0][layer]
        new = [position for position in present if position not in stored]
        pairs += layers * sum(other <= position for position in new for other in present)
    assert second.revived.sum() > 0
    attention = pairs * LayerShape.of(model.config).pair_flops
    assert turn_flops(model.config, first.selected[0], second.selected[0], 24, 9) == products + attention
    # of a whole prompt, they are the second part of one prefill's, whatever the windows
    windowed = random_variant("gemma3", 3).config
    logits = prefill_flops(windowed, [0] * windowed.num_hidden_layers)
    whole, part = (prefill_flops(windowed, [n] * windowed.num_hidden_layers) for n in (34, 24))
    assert turn_flops(windowed, {}, {}, 24, 9) == whole - part + logits


def test_generations_in_turns_are_those_alone() -> None:
    model = random_model("llama", 5, num_layers=4)
    prompt = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(2))
    methods = [Lazy({1: 0.5, 3: 0.6}), Baseline(), Lazy({2: 0.3})]
    alone = [lazyllm.generate(model, prompt, method, 7, ()) for method in methods]
    assert len({tuple(out.token_ids) for out in alone}) > 1
    for run, expected in zip(in_turns(model, methods, prompt, 7), alone, strict=True):
        assert (run.token_ids, len(run.step_s)) == (expected.token_ids, 6)
        assert run.flops == prefill_flops(model.config, expected.computed[0].tolist())
        revived = (expected.computed[1:] - expected.computed[:-1]).mean(axis=1)
        assert run.revived == pytest.approx(revived.tolist())


def test_command_measures_methods_and_transformers(tmp_path, capsys) -> None:
    cases = cases_of(
        f"{SHAPE} --tokens 20 30 --new-tokens 1 4 --method paper --method keep1 --against hf --repeats 2",
        tmp_path / "out.json",
    )
    sizes = product((20, 30), (0,), (1, 4), ("paper", "keep1", "hf"))
    assert list(cases) == [(name, tokens, turn, new) for tokens, turn, new, name in sizes]
    for (name, tokens, _, new), pairs in cases.items():
        assert [len(pair.other.step_s) for pair in pairs] == [min(1, new - 1) if name == "hf" else new - 1] * 2
        if name != "paper":  # all tokens are kept
            assert all(pair.baseline.token_ids == pair.other.token_ids for pair in pairs)
            assert all(pair.baseline.flops == pair.other.flops for pair in pairs)
            assert {pair.baseline.kv_bytes for pair in pairs} == {tokens * 4 * 2 * 64 * 4}
    shown = capsys.readouterr().out
    assert "0.00 GB of weights" in shown.splitlines()[0]
    assert shown.count("\n| ") == len(cases) + 2


def test_command_measures_second_turns(tmp_path) -> None:
    cases = cases_of(f"{SHAPE} --tokens 20 --turn 3 5 --method keep1 --against hf --repeats 2", tmp_path / "out.json")
    assert list(cases) == [(name, 20, turn, 1) for turn, name in product((3, 5), ("keep1", "hf"))]
    config = AutoConfig.for_model(**fields_of("layers=4,width=64,vocab=50,mlp=64"))
    for (_, _, turn, _), pairs in cases.items():
        whole, prompt = (prefill_flops(config, [n] * 4) for n in (20 + 1 + turn, 20))
        head = 2 * 64 * 50
        assert {run.flops for pair in pairs for run in (pair.baseline, pair.other)} == {whole - prompt + head}
        assert [(pair.other.token_ids, pair.other.revived) for pair in pairs] == [
            (pair.baseline.token_ids, [0]) for pair in pairs
        ]


@pytest.mark.slow
def test_command_measures_the_field(tmp_path) -> None:
    shape = SHAPE.replace("layers=4", "layers=8,kv_heads=1")
    cases = cases_of(f"{shape} --field --speedups 1.3 --tokens 60 --new-tokens 2 --repeats 1", tmp_path / "field.json")
    pair_of = {name: pairs[0] for (name, *_), pairs in cases.items()}
    few = {"oracle", "baseline", "uniprefill"}  # UniPrefill keeps 256 tokens
    assert {name.split()[0] for name in pair_of} == set(METHODS) - few
    config = AutoConfig.for_model(**fields_of("layers=8,width=64,vocab=50,mlp=64,kv_heads=1"))
    # cut after layer 2 + 2 - 1 of 8, at a share of the 60 tokens and the window of 32
    keep = METHODS["asl"].solve({"threshold": 1e9}, config, 60, 1.3)
    assert pair_of["asl 1.3x"].other.flops == prefill_flops(config, [60] * 3 + [keep_count(keep, 60) + 32] * 5)
    for name in ("claa 1.3x", "fastkv 1.3x", "lazy 1.3x", "pyramidinfer 1.3x", "static_pruning 1.3x"):
        assert pair_of[name].baseline.flops / pair_of[name].other.flops == pytest.approx(1.3, rel=0.05)
