"""GraphWalks: made graphs against a search by hand, the scorer against its rule, rows in the dataset's own files."""

from pathlib import Path

import pandas as pd
import pytest

from eval.benchmarks.graphwalks import SUITE, GraphWalksConfig, make_example
from eval.benchmarks.prompts import build_prompt
from eval.benchmarks.suite import DataSettings
from lazyllm.errors import UserError
from lazyllm.models.load import load_tokenizer_of
from lazyllm.spec import ModelSpec

BFS, PARENTS = SUITE.datasets


@pytest.mark.parametrize("number", range(20))
def test_answer_of_a_made_graph_is_that_of_a_search(number: int) -> None:
    for dataset in (BFS, PARENTS):
        example = make_example(dataset, f"{dataset.name}-{number}", 5 + number, 1000)
        edges = [tuple(line.split(" -> ")) for line in example.context.splitlines()]
        words = example.input.replace("?", " ").replace(".", " ").split()
        node = words[words.index("node") + 1]
        if dataset is PARENTS:
            expected = {source for source, target in edges if target == node}
        else:
            distance, queue = {node: 0}, [node]
            while queue:
                first = queue.pop(0)
                for source, target in edges:
                    if source == first and target not in distance:
                        distance[target] = distance[first] + 1
                        queue.append(target)
            expected = {name for name, steps in distance.items() if steps == int(words[words.index("exactly") + 1])}
        assert node not in expected
        assert example.answers == (f"Final Answer: [{', '.join(sorted(expected))}]",)
        assert len(edges) == len(set(edges)) == 2 * (5 + number)
        spans = [example.context[start:end] for start, end in example.evidence]
        if dataset is PARENTS:
            assert sorted(spans) == sorted(f"{source} -> {node}\n" for source in expected)
        else:
            assert {f"{source} -> {target}\n" for source, target in edges if source == node} <= set(spans)


def test_made_rows_fill_the_length_and_no_more() -> None:
    spec = ModelSpec("tiny")
    tokenizer = load_tokenizer_of(spec)
    assert tokenizer is not None
    settings = DataSettings(options=GraphWalksConfig([2000, 4000], 2), model=spec)
    loaded = SUITE.load(BFS, settings)
    assert loaded.total == 4
    assert [example.length for example in loaded.examples] == [2000, 4000, 2000, 4000]
    for example in loaded.examples:
        prompt = build_prompt(example, loaded.dataset, tokenizer)
        assert 0.95 * example.length < len(prompt.token_ids) + loaded.max_new_tokens <= example.length
    again = SUITE.load(BFS, settings)
    assert again.examples == loaded.examples
    assert len({example.context for example in loaded.examples}) == 4


def test_length_too_short_is_refused() -> None:
    with pytest.raises(UserError, match=r"graphwalks\.lengths: 520 is too short"):
        SUITE.load(BFS, DataSettings(options=GraphWalksConfig([520]), model=ModelSpec("tiny")))


def test_rows_of_the_datasets_files(tmp_path: Path) -> None:
    made = [make_example(dataset, f"{dataset.name}-{n}", 9, 1) for n in range(2) for dataset in (BFS, PARENTS)]
    rows = [{**example.official} | {"prompt": f"{example.context}Operation:\nfind"} for example in made]
    pd.DataFrame(rows).to_parquet(tmp_path / "graphwalks_128k_and_shorter.parquet")
    for dataset in (BFS, PARENTS):
        loaded = SUITE.load(dataset, DataSettings(dir=tmp_path, options=GraphWalksConfig()))
        own = [example for example in made if example.dataset == dataset.name]
        assert [example.context for example in loaded.examples] == [example.context for example in own]
        assert [example.answers for example in loaded.examples] == [example.answers for example in own]
        assert {example.input for example in loaded.examples} == {"Operation:\nfind"}
