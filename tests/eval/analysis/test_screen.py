from eval.analysis.screen import summary
from eval.store.results import Results
from tests.eval.analysis.made import example, stored


def test_summary_by_length_names_a_setting_as_the_mean_does() -> None:
    visits = [example("trec", name, tokens, score=0.5) for name, tokens in (("a", 100), ("b", 600))]
    frame = summary(Results([stored(visits, "oracle", {"keep": "2x"})]), "length")
    assert frame[["part", "label", "examples"]].to_numpy().tolist() == [
        [part, label, examples]
        for label in ("baseline", "oracle, keep=2x (diagnostic)")
        for part, examples in (("all", 2), ("1-512", 1), ("513-1024", 1))
    ]
