from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from eval.analysis.field import field
from eval.analysis.serving import FIGURE, requests, serving, ttft_fit
from eval.store.record import Record, Request
from eval.store.results import Results
from eval.store.runs import StoredRun
from tests.eval.analysis.made import drawn, example, stored, texts


def request(sent_at: float, end_s: float = 1.0, tpot_s: float | None = 0.01) -> Request:
    return Request(
        headers_s=0.1, first_event_s=0.1, first_content_s=0.2, end_s=end_s, tpot_s=tpot_s, sent_at=sent_at,
        prompt_tokens=1, completion_tokens=3, cached_tokens=None, retries=0, noise=None,
    )  # fmt: skip


def run_of(records: list[Record], **load: Any) -> StoredRun:
    run = stored(records, "server", {"label": "FP8"})
    run.about["config"]["load"] = load
    run.identity["server"] = {}
    return run


def test_serving_has_percentiles_and_goodput_of_each_side() -> None:
    times = [0.1, 0.2, 0.3, 0.9]
    records = [
        example("hops", str(number), ttft_s=ttft, request=request(sent), baseline={"request": request(sent + 50, 2.0)})
        for number, (ttft, sent) in enumerate(zip(times, [0.0, 0.5, 10.0, 10.25], strict=True))
    ]
    run = run_of(records, concurrency=2, ttft_limit_s=0.35, tpot_limit_s=0.01)
    table = serving(Results([run])).frame.set_index("label")
    assert table["load"].tolist() == ["2 at once"] * 2
    own, theirs = table.loc["FP8"], table.loc["baseline"]
    assert own["ttft_s_p50"] == pytest.approx(0.25)
    assert own["ttft_s_p90"] == pytest.approx(np.percentile(times, 90))
    assert own["pct_good"] == 75
    assert own["goodput_per_s"] == pytest.approx(3 / (1.5 + 1.25))  # busy from 0 to 1.5 and from 10 to 11.25
    assert (theirs["pct_good"], theirs["goodput_per_s"]) == (0, 0)
    assert "| server | FP8 |" in field(Results([run])).to_markdown()
    assert serving(Results([stored([example("hops", "a")])])).frame.empty  # a run in this process


def test_unknown_time_per_token_is_missing_and_breaks_no_limit() -> None:
    run = run_of([example("hops", "a", request=request(0, tpot_s=None))], rate=0.5, tpot_limit_s=1e-9)
    (row,) = requests(Results([run])).to_dict("records")
    assert (row["load"], math.isnan(row["tpot_s"]), row["is_good"]) == ("0.5 per s", True, True)


def test_fit_finds_the_coefficients() -> None:
    n = np.array([100, 3000, 20_000, 100_000])
    a, b, c = 2e-10, 3e-5, 0.02
    group = pd.DataFrame({"prompt_tokens": n, "ttft_s": a * n**2 + b * n + c, "load": "1 at once"})
    assert ttft_fit(group) == pytest.approx((a, b, c), rel=1e-6)
    assert np.isnan(ttft_fit(group[:2])).all()
    assert np.isnan(ttft_fit(group.assign(load="2 at once"))).all()  # requests waited for others


def test_figure_draws_each_setting_with_its_fit() -> None:
    records = [
        replace(example("hops", str(n), n, ttft_s=1e-4 * n, request=request(n)), baseline=None) for n in (100, 200, 400)
    ]
    frame = FIGURE.data(Results([run_of(records)]))
    assert any("FP8, 1 at once: " in text and "100 n/1000" in text for text in texts(drawn(FIGURE, frame)))
    frame = FIGURE.data(Results([run_of(records, rate=2)]))
    assert any(text == "FP8, 2 per s" for text in texts(drawn(FIGURE, frame)))
    assert FIGURE.data(Results([stored([example("hops", "a")])])).empty
