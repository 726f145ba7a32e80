from pathlib import Path

from eval.analysis.evidence import data, evidence, evidence_shares, plot
from eval.store.results import Results
from eval.store.runs import StoredRun
from eval.store.visit import Visit
from tests.eval.analysis.made import drawn, example, stored, texts


def with_evidence(dataset: str, name: str, score: float, prefill: list, revived: list | None = None) -> Visit:
    revived = revived or [0.0] * len(prefill)
    shares = {"evidence_prefill": prefill, "evidence_revived": revived, "evidence_recall": prefill[-1]}
    return example(dataset, name, score=score, **shares)


def runs() -> list[StoredRun]:
    """LazyLLM loses the needle of the wrong answer after layer 2; random token drop before layer 1."""
    lazy = [
        with_evidence("lookup", "a", 1.0, [1.0, 1.0, 0.5], [0.0, 0.0, 0.25]),
        with_evidence("lookup", "b", 0.999999999, [1.0, 0.5, 0.5]),  # a full score, as ROUGE gives it
        with_evidence("lookup", "c", 0.5, [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]),
        with_evidence("hops", "a", 0.0, [1.0, 0.75, 0.0]),
        example("hops", "b"),
    ]
    drop = [with_evidence("lookup", "a", 0.0, [0.25, 0.25, 0.25])]
    return [stored(lazy), stored(drop, "random_drop", {"keep": 0.5}), stored([example("lookup", "a")], "baseline")]


def test_evidence_shares_by_hand() -> None:
    columns = ["label", "task", "outcome", "layer", "examples", "in_prefill", "revived"]
    found = evidence_shares(Results(runs()))[columns].to_numpy().tolist()
    lazy, drop = "lazy, schedule=paper", "random_drop, keep=0.5"
    assert found == [
        [lazy, "single_doc_qa", "right", 1, 2, 100, 0],
        [lazy, "single_doc_qa", "right", 2, 2, 75, 0],
        [lazy, "single_doc_qa", "right", 3, 2, 50, 12.5],
        [lazy, "single_doc_qa", "wrong", 1, 1, 100, 0],
        [lazy, "single_doc_qa", "wrong", 2, 1, 100, 0],
        [lazy, "single_doc_qa", "wrong", 3, 1, 0, 100],
        *([drop, "single_doc_qa", "wrong", layer, 1, 25, 0] for layer in (1, 2, 3)),
        [lazy, "multi_doc_qa", "wrong", 1, 1, 100, 0],
        [lazy, "multi_doc_qa", "wrong", 2, 1, 75, 0],
        [lazy, "multi_doc_qa", "wrong", 3, 1, 0, 0],
    ]


def test_evidence_table_names_the_layer_that_lost_most() -> None:
    cells = evidence(Results(runs())).cells
    assert sorted(cells.drop(columns="model").to_numpy().tolist()) == [
        ["lazy, schedule=paper", "multi_doc_qa", "wrong", "1", "0.0", "0.0", "-75.0 after layer 2"],
        ["lazy, schedule=paper", "single_doc_qa", "right", "2", "50.0", "12.5", "-25.0 after layer 1"],
        ["lazy, schedule=paper", "single_doc_qa", "wrong", "1", "0.0", "100.0", "-100.0 after layer 2"],
        ["random_drop, keep=0.5", "single_doc_qa", "wrong", "1", "25.0", "0.0", "-75.0 after layer 0"],
    ]


def test_evidence_figure_draws_the_setting_with_most_examples() -> None:
    gentle = stored([with_evidence("lookup", "a", 1.0, [1.0, 1.0, 1.0])], settings={"schedule": {"2": 0.9}})
    frame = data(Results([*runs(), gentle]))
    assert set(frame["label"]) == {"lazy, schedule=paper", "random_drop, keep=0.5"}  # the setting with most examples
    picture = drawn(plot, frame)
    axes = {panel.get_title(loc="left"): panel for panel in picture.axes}
    curves = [line.get_ydata().tolist() for line in axes["single doc QA"].lines]
    assert sorted(curves) == [[25, 25, 25], [100, 75, 50], [100, 100, 0]]
    assert len({str(line.get_linestyle()) for line in axes["single doc QA"].lines}) == 2
    written = texts(picture)
    for text in ("LazyLLM, schedule=paper", "right answers", "wrong answers", "computed in prefill, %"):
        assert text in written
    assert data(Results([stored([example("lookup", "a")])])).empty


def test_evidence_shares_pool_seeds() -> None:
    seeds = [
        stored([with_evidence("lookup", "a", 0.0, [share])], "random_drop", {"keep": 0.5}, seed=seed)
        for seed, share in enumerate((0.0, 1.0))
    ]
    for runs in (seeds, seeds[::-1]):
        assert evidence_shares(Results(runs))[["examples", "in_prefill"]].to_numpy().tolist() == [[2, 50]]


def test_evidence_counts_an_example_of_two_runs_once() -> None:
    both = {1.0: Path("one"), 0.0: Path("two")}  # of two alike, the last one counts
    twice = [stored([with_evidence("lookup", "a", score, [1.0])], folder=folder) for score, folder in both.items()]
    assert evidence_shares(Results(twice))["outcome"].tolist() == ["wrong"]
