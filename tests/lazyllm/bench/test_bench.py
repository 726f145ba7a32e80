"""The benchmark's arithmetic by hand, its planned revivals, and its command line end to end. Times are not tested."""

from __future__ import annotations

import itertools
import json
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import lazyllm
from lazyllm.bench import turn_two
from lazyllm.bench.__main__ import main, method_of, schedule_of
from lazyllm.bench.case_table import quartiles
from lazyllm.bench.cases import Pair, Run, cases_of
from lazyllm.bench.clock import Waits, in_turns, revived_flops
from lazyllm.bench.shapes import SHAPES, build, config_of
from lazyllm.bench.steered import SteeredLazy
from lazyllm.bench.turn_two import AttentionClock, TurnSample, attention_flops, turn_cases_of, turn_flops
from lazyllm.engine.decoder import open_decoder
from lazyllm.engine.flops import LayerShape, prefill_flops
from lazyllm.engine.inputs import Prompt
from lazyllm.errors import UserError
from lazyllm.methods import METHODS, Baseline, Lazy
from lazyllm.methods.support.schedule import keep_count
from lazyllm.spec import ModelSpec
from scripts import bench_report
from tests.reference import random_model

SHAPE = "--shape layers=4,width=64,vocab=50,mlp=64 --dtype float32 --device cpu"
# steps of 3 and 5 s revive 10 and 30 FLOPs, one of 2 s nothing; the baseline's steps take 2, 4 and 1 s
PAIR = Pair(Run(8.0, [2.0, 4.0, 1.0], 15.0, [0, 0, 0], 50.0), Run(4.0, [3.0, 2.0, 5.0], 14.0, [10, 0, 30], 50.0))


def test_ratios_by_hand() -> None:
    assert PAIR.idle_step_ratio() == 2 / 4
    assert PAIR.reviving_step_ratio() == (3 / 2 + 5 / 1) / 2
    assert PAIR.total_ratio() == 14.0 / 15.0
    assert PAIR.step_ratio() == (10 / 3) / (7 / 3)
    # without revival, steps of 3 and 5 s would take half of the baseline's median 2 s; 40 FLOPs at 80 in 4 s
    # are 2 s
    assert PAIR.revival_cost(prefill_flops=80) == (3 - 1 + 5 - 1) / 2
    assert PAIR.other.utilisation(prefill_flops=80) == 80 / 4.0 / 50.0
    never = Pair(PAIR.baseline, Run(4.0, [2.0, 2.0, 2.0], 10.0, [0, 0, 0], 50.0))
    assert (never.reviving_step_ratio(), never.revival_cost(80)) == (None, None)
    always = Pair(PAIR.baseline, Run(4.0, [2.0, 2.0, 2.0], 10.0, [1, 1, 1], 50.0))
    assert (always.idle_step_ratio(), always.revival_cost(80)) == (None, None)
    transformers = Pair(PAIR.baseline, Run(9.0, [7.0], 23.0, [0], 50.0))
    assert (transformers.step_ratio(), transformers.idle_step_ratio()) == (3.0, None)
    assert PAIR.equal_step_ratio() is None
    beside = Pair(PAIR.baseline, PAIR.other, Run(1.0, [1.0, 2.0, 1.5], 5.5, [0, 0, 0], 50.0))
    assert beside.equal_step_ratio() == 3.0 / 1.5
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_revived_flops_are_those_of_the_products_that_run() -> None:
    """PyTorch's counter sees the linear maps; attention's pairs are counted from the selections, as prefill's are."""
    model, schedule = random_model("llama", 3, num_layers=5), {2: 0.5, 3: 0.6}
    prompt = torch.randint(0, 97, (24,), generator=torch.Generator().manual_seed(1))
    method = Lazy(schedule)
    out = lazyllm.generate(model, prompt, method, 6, ())
    found = revived_flops(model, method, out.selected, 24)
    shape = LayerShape.of(model.config)
    with torch.inference_mode(), open_decoder(model) as decoder:
        session = method.start(decoder, Prompt(prompt), 6)
        session.prefill(prompt)
        for step, token_id in enumerate(out.token_ids[:-1]):
            with FlopCounterMode(display=False) as counter:
                session.step(token_id)
            by_name = counter.get_flop_counts()["Global"].items()
            products = sum(flops for name, flops in by_name if str(name) in ("aten.mm", "aten.addmm", "aten.linear"))
            newest = 5 * shape.linear_flops + 2 * shape.width * model.config.vocab_size
            rows = (out.computed[step + 1] - out.computed[step]).sum()
            assert products - newest == rows * shape.linear_flops
            pairs, remainder = divmod(found[step] - int(rows) * shape.linear_flops, shape.pair_flops)
            assert remainder == 0
            assert rows <= pairs <= rows * 24 or rows == pairs == 0
    assert any(found)


def test_attention_of_what_is_revived_is_counted_pair_by_pair() -> None:
    model, shape = random_model("llama", 0, num_layers=3), LayerShape.of(random_model("llama", 0, num_layers=3).config)
    # prefill continues with 0, 4, 5; the first step's set holds 0, 2, 3 and itself, the second's 0, 2, 5
    selected = [{1: [0, 4, 5]}, {1: [0, 2, 3, 6]}, {1: [0, 2, 5, 6, 7]}]
    # revived: 2, which attends to 0 and 2, and 3, which attends to 0, 2 and 3; in each of two layers
    assert revived_flops(model, Lazy({1: 0.5}), selected, 6) == [2 * (2 * shape.linear_flops + 5 * shape.pair_flops), 0]


def test_flops_of_a_second_turn_are_those_of_the_products_that_run() -> None:
    """Linear maps by PyTorch's counter; a layer's pairs by hand from the selections."""
    model, schedule = random_model("llama", 3, num_layers=5), {2: 0.5, 3: 0.6}
    text = torch.randint(0, 97, (33,), generator=torch.Generator().manual_seed(2))
    shape = LayerShape.of(model.config)
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
    attention = pairs * shape.pair_flops
    assert turn_flops(model, [2, 3], first, second, 24, 9) == (products + attention, attention)


def test_attention_has_its_own_clock_and_its_own_rate(monkeypatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(turn_two, "read_clock", lambda device: float(next(ticks)))
    model = random_model("llama", 3, num_layers=5)
    with open_decoder(model) as decoder, AttentionClock(model.device) as clock:
        Baseline().start(decoder, Prompt(torch.arange(9)), 1).prefill(torch.arange(9))
    assert clock.seconds == 5  # a tick for each layer's call
    shape = LayerShape.of(model.config)
    assert attention_flops(model.config, [9, 9, 3, 3, 3]) == (2 * 45 + 3 * 6) * shape.pair_flops
    # the turn's attention takes 1 s at the prefill's rate, all else 0.5 s
    sample = TurnSample(3.0, 1.0, 3.0, 10, 2, 4, 2, revived=0.0)
    assert sample.cost() == 3.0 / (4 / (10 / 3.0))
    assert sample.cost_by_kind() == 2


def test_second_turns_on_the_command_line(tmp_path, capsys) -> None:
    file = tmp_path / "turns.json"
    arguments = f"{SHAPE} --threads 1 --tokens 20 --turn 3 5 --method keep1 --repeats 2 --warmup 0 --json"
    main([*arguments.split(), str(file)])
    cases = turn_cases_of(json.loads(file.read_text()))
    assert [(case.turn, case.name) for case in cases] == [*product((3, 5), ("baseline", "keep1", "transformers"))]
    config = config_of("layers=4,width=64,vocab=50,mlp=64", 30)
    for case in cases:
        whole, prompt = (prefill_flops(config, [n] * 4) for n in (20 + 1 + case.turn, 20))
        head = 2 * 64 * 50
        assert [sample.turn_flops for sample in case.samples] == [whole - prompt + head] * 2
        pairs = (21 + case.turn) * (22 + case.turn) // 2 - 20 * 21 // 2
        assert [sample.turn_attention_flops for sample in case.samples] == [4 * pairs * 4 * 64] * 2
        assert [sample.revived for sample in case.samples] == [0, 0]
        assert case.beside(lambda sample: sample.turn_flops) == 1
    bench_report.main([str(tmp_path)])
    assert "| keep1 | 20 | 5 |" in (tmp_path / "README.md").read_text()
    assert "| transformers | 20 | 3 |" in capsys.readouterr().out


def test_steered_sessions_revive_as_planned() -> None:
    model = random_model("llama", 3, num_layers=4)
    prompt = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(1))
    out = lazyllm.generate(model, prompt, SteeredLazy({1: 0.5, 2: 0.5}, drift=0.3, every=3), 9, ())
    revived = (out.computed[1:] - out.computed[:-1]).sum(axis=1)
    assert [bool(count) for count in revived] == [True, False, False, True, False, False, True, False]
    assert out.computed[0].tolist() == [60, 30, 15, 15]
    for before, after, count in zip(out.selected, out.selected[1:], revived, strict=False):
        if not count:
            assert [position for position in after[1] if position < 60] == [p for p in before[1] if p < 60]
    first, second = (
        lazyllm.generate(model, prompt, SteeredLazy({1: 0.5}, drift=0.3, seed=seed), 2, ()) for seed in (1, 2)
    )
    assert first.selected != second.selected


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 1], 1),
        (lambda x: float(x.sum()), 1),
        (lambda x: bool((x > 1).any()), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x[torch.tensor([0])] + x.sum(), 0),
        (lambda x: torch.where(x > 1, x, 0).argsort(), 0),
    ],
)
def test_waits_are_seen(call, waits: int) -> None:
    numbers = torch.arange(3.0)
    with Waits() as counter:
        call(numbers)
    assert len(counter.found) == waits


def test_generations_in_turns_are_those_alone() -> None:
    model = random_model("llama", 5, num_layers=4)
    prompt = torch.randint(0, 97, (30,), generator=torch.Generator().manual_seed(2))
    methods = [Lazy({1: 0.5, 3: 0.6}), Baseline(), Lazy({2: 0.3})]
    alone = [lazyllm.generate(model, prompt, method, 7, ()) for method in methods]
    assert len({tuple(out.token_ids) for out in alone}) > 1
    for done, expected in zip(in_turns(model, [(method, prompt) for method in methods], 7), alone, strict=True):
        assert (done.token_ids, done.selected) == (expected.token_ids, expected.selected)
        assert len(done.seconds) == 7
        assert done.run().product_flops_per_s > 0
    assert model.config._attn_implementation == "sdpa"


def test_shapes() -> None:
    assert config_of("llama2", 99).hidden_size == 4096
    assert all(config_of(name, 99).max_position_embeddings == 99 for name in SHAPES)
    config = config_of("layers=3,width=192,kv_heads=1", 99)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (3, 3, 1)
    assert config.intermediate_size == 512
    small = config_of("layers=8,width=128,mlp=256,heads=4,kv_heads=2,vocab=1000", 9)
    parameters = sum(p.numel() for p in build(small, ModelSpec("small", "dummy", "float32", "cpu")).parameters())
    # embeddings and logits; in 8 layers q, o, k, v, three of the MLP, two norms; a last norm
    assert parameters == 2 * 1000 * 128 + 8 * (128 * (128 * 2 + 64 * 2 + 256 * 3) + 256) + 128
    for wrong in ("llama-7b", "layers=2", "layers=x,width=2", "depth=3,width=2"):
        with pytest.raises(ValueError, match="--shape"):
            config_of(wrong, 9)


def test_methods_by_name() -> None:
    assert method_of(*schedule_of("paper", 10)) == Lazy(lazyllm.Schedule({3: 0.7, 6: 0.7, 9: 0.7}))
    assert method_of(*schedule_of("keep1", 10)) == Lazy(lazyllm.Schedule({3: 1.0, 6: 1.0, 9: 1.0}))
    for text in ("{2: 0.4, 5: 0.5}@0.1", '{"2": 0.4, "5": 0.5}@0.1', "2:0.4+5:0.5@0.1"):
        assert method_of(*schedule_of(text, 10)) == SteeredLazy(lazyllm.Schedule({2: 0.4, 5: 0.5}), drift=0.1)
    with pytest.raises(ValueError, match="only 10 layers"):
        schedule_of("{12: 0.4}", 10)
    for share in ("x", "0", "1.5", ""):
        with pytest.raises(UserError, match=f"--method paper@{share}: expected SCHEDULE@SHARE with a share in"):
            schedule_of(f"paper@{share}", 10)


def test_the_command_line(tmp_path, capsys) -> None:
    file = tmp_path / "out.json"
    arguments = (
        f"{SHAPE} --threads 1 --tokens 20 30 --new-tokens 1 11 --method paper@0.2 --method keep1 --against hf "
        "--repeats 2 --warmup 0 --json"
    )
    main([*arguments.split(), str(file)])
    written, shown = json.loads(file.read_text()), capsys.readouterr().out
    names = ("paper@0.2", "keep1", "hf")
    assert [(case["tokens"], case["new_tokens"], case["name"]) for case in written["cases"]] == [
        *product((20, 30), (1, 11), names)
    ]
    assert written["threads"] == 1
    alone, paper, keeping, hf = (written["cases"][number] for number in (0, 3, 4, 5))
    assert [pair["other"]["step_s"] for pair in alone["pairs"]] == [[], []]
    assert len(paper["pairs"]) == 2
    assert [len(pair["other"]["step_s"]) for pair in paper["pairs"]] == [10, 10]
    assert paper["untimed"]["prefill_waits"] == 0
    assert paper["untimed"]["step_waits"] <= 3
    assert keeping["untimed"]["aux_bytes"] == 0
    assert keeping["untimed"]["kv_bytes"] == keeping["baseline_untimed"]["kv_bytes"] == 20 * 4 * 2 * 64 * 4
    assert hf["untimed"] is None
    assert shown.count("TTFT speedup") == 4
    assert [(case["boundaries"], case["new_tokens"]) for case in (paper, keeping, hf)] == [(3, 11), (0, 11), (0, 11)]


def test_long_prompts_are_sampled_once(tmp_path, capsys) -> None:
    file = tmp_path / "out.json"
    main([*f"{SHAPE} --tokens 20 --new-tokens 1 --repeats 0 --method paper --json".split(), str(file)])
    [case] = json.loads(file.read_text())["cases"]
    [pair] = case["pairs"]
    assert pair["other"]["ttft_s"] == case["untimed"]["prefill_s"]
    assert pair["baseline"]["ttft_s"] == case["baseline_untimed"]["prefill_s"]
    assert "TTFT speedup" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--repeats 0 is one prefill"):
        main(f"{SHAPE} --tokens 20 --repeats 0 --new-tokens 1 --against hf".split())


def test_the_whole_field(tmp_path, capsys) -> None:
    shape = SHAPE.replace("layers=4", "layers=8,kv_heads=1")
    how = "--field --speedups 1.3 --tokens 60 --new-tokens 3 --repeats 1 --warmup 0 --json"
    file = tmp_path / "field.json"
    main([*f"{shape} {how}".split(), str(file)])
    report = json.loads(file.read_text())
    cases = {case.name: case for case in cases_of(report)}
    diagnostic_or_baseline = {"oracle", "baseline"}
    assert {name.split()[0] for name in cases} == set(METHODS) - diagnostic_or_baseline
    config = config_of("layers=8,width=64,vocab=50,mlp=64,kv_heads=1", 63)
    for case in cases.values():
        [pair] = case.pairs
        assert pair.equal is not None
        assert [len(run.step_s) for run in (pair.baseline, pair.other, pair.equal)] == [2, 2, 2]
    # cut after layer 2 + 2 - 1 of 8, at a share of the 60 tokens and the window of 32
    keep = METHODS["asl"].solve({"threshold": 1e9}, config, 60, 1.3)
    flops = prefill_flops(config, [60] * 3 + [keep_count(keep, 60) + 32] * 5)
    assert cases["asl 1.3x"].ideal_ttft_speedup == prefill_flops(config, [60] * 8) / flops
    for name in ("claa 1.3x", "fastkv 1.3x", "lazy 1.3x", "pyramidinfer 1.3x", "static_pruning 1.3x"):
        assert cases[name].ideal_ttft_speedup == pytest.approx(1.3, rel=0.05)
        counted = cases[name].untimed
        assert counted is not None
        assert counted.prefill_waits == 0
    shown = capsys.readouterr().out
    assert shown.count("\n| ") == len(cases) + 1
    bench_report.main([str(tmp_path)])
    assert (tmp_path / "field.png").read_bytes().startswith(b"\x89PNG")
    assert "| asl 1.3x | 60 |" in (tmp_path / "README.md").read_text()
    with pytest.raises(SystemExit, match="--field times pairs of all methods"):
        main([*f"{shape} --field --against hf".split()])
