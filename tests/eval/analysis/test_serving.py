from typing import Any

import numpy as np
import pytest

from eval.analysis.field import field
from eval.analysis.serving import serving
from eval.store.results import Results
from eval.store.runs import StoredRun
from eval.store.visit import ServerRequest, Visit
from tests.eval.analysis.made import conversation, example, stored


def answer(ttft_s: float, tpot_s: float | None = 0.01) -> dict[str, Any]:
    """What a server's answer has."""
    request = ServerRequest(
        headers_s=0.1, first_event_s=0.1, first_content_s=0.2, end_s=1.0, tpot_s=tpot_s, sent_at=0.0,
        prompt_tokens=1, completion_tokens=3, cached_tokens=None, retries=0,
    )  # fmt: skip
    return {"ttft_s": ttft_s, "decode_step_s": None, "request": request}


def run_of(visits: list[Visit], concurrency: int = 1, rate: float | None = None) -> StoredRun:
    load = {"concurrency": concurrency, "rate": rate}
    return stored(visits, "server", {"label": "FP8"}, load=load)


def test_serving_has_percentiles_of_each_arm() -> None:
    times = [0.1, 0.2, 0.3, 0.9]
    visits = [
        example("hops", str(number), **answer(ttft, 0.01 * number), baseline=answer(2 * ttft))
        for number, ttft in enumerate(times)
    ]
    results = Results([run_of(visits, concurrency=2)])
    table = serving(results).frame.set_index("label")
    assert table["load"].tolist() == ["2 at once"] * 2
    own, theirs = table.loc["FP8"], table.loc["baseline"]
    for n in (50, 90, 99):
        assert own[f"ttft_p{n}"] == pytest.approx(np.percentile(times, n))
        assert theirs[f"ttft_p{n}"] == pytest.approx(2 * np.percentile(times, n))
        assert own[f"tpot_p{n}"] == pytest.approx(np.percentile([0, 0.01, 0.02, 0.03], n))
    assert "| server | FP8 |" in field(results).to_markdown()
    assert serving(Results([stored([example("hops", "a")])])).frame.empty  # a run in this process
    unknown = serving(Results([run_of([example("hops", "a", **answer(0.1, None), baseline=answer(0.1))])]))
    assert unknown.cells[["load", "n", "TPOT p50, ms"]].to_numpy().tolist() == [
        ["1 at once", "1", "10.0"], ["1 at once", "1", "-"]
    ]  # fmt: skip


def test_serving_counts_the_requests_of_all_turns() -> None:
    own, baseline = [answer(0.1), answer(0.3), answer(0.5)], [answer(1.0), answer(2.0), answer(4.0)]
    table = serving(Results([run_of([conversation("hops", "a", [10, 5, 5], own, baseline)], rate=0.5)])).frame
    found = table.set_index("label")
    assert found["requests"].tolist() == [3, 3]
    assert (found.loc["FP8", "ttft_p50"], found.loc["baseline", "ttft_p50"]) == (0.3, 2.0)
    assert set(found["load"]) == {"0.5 per s"}
