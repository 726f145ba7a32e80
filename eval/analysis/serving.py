"""Servers: percentiles of TTFT and of the time per later token, goodput, and TTFT by prompt length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as MplFigure

from eval.analysis.columns import BASELINE, SETTING, in_order
from eval.analysis.style import legend_beside, look_of, new_figure, panels_of, styled
from eval.analysis.table import EXAMPLES, LABEL, MODEL, Column, Figure, Table, cells
from eval.benchmarks.datasets import DATASETS
from eval.store.results import Results

_CLOCKS = {"ttft_s": "TTFT", "tpot_s": "TPOT"}
_KEYS = [*SETTING, "load"]
_OF_REQUEST = [*_KEYS, "dataset", "id", "prompt_tokens", *_CLOCKS, "sent_at", "end_s", "retries", "is_good"]
_FIT = ("fit_a", "fit_b", "fit_c")  # the coefficients of `ttft_fit`
_QUANTILES = {f"{clock}_p{n}": (clock, n) for clock in _CLOCKS for n in (50, 90, 99)}
_COLUMNS = (
    MODEL,
    LABEL,
    Column("load", "load"),
    EXAMPLES,
    *(Column(name, f"{_CLOCKS[clock]} p{n}, ms", 1, scale=1e-3) for name, (clock, n) in _QUANTILES.items()),
    Column("pct_good", "good, %", 1),
    Column("goodput_per_s", "goodput, 1/s", 2),
)


def serving(results: Results) -> Table:
    """Each server's times and goodput under each load."""
    rows = []
    key: Any
    for key, group in requests(results).groupby(_KEYS, sort=False):
        row = dict(zip(_KEYS, key, strict=True)) | {"examples": len(group)}
        row |= {name: group[clock].quantile(n / 100) for name, (clock, n) in _QUANTILES.items()}
        row |= {"pct_good": 100 * group["is_good"].mean(), "goodput_per_s": group["is_good"].sum() / _busy_s(group)}
        rows.append(row | dict(zip(_FIT, ttft_fit(group), strict=True)))
    columns = [*_KEYS, "examples", *_QUANTILES, "pct_good", "goodput_per_s", *_FIT]
    table = pd.DataFrame(rows, columns=columns)
    caption = (
        "TTFT: from just before the request to the first event with a token. TPOT: (last - first) / (tokens - 1), as "
        "an event may hold several tokens; - if the server does not count them. Percentiles over requests. Good: "
        "answers within load.ttft_limit_s and load.tpot_limit_s (all, if neither is given); goodput: their number per "
        "second in which this server had a request to answer. Requests that failed are in no column."
    )
    return Table("serving", "Servers under load", caption, table, cells(table, _COLUMNS, results), keys=3)


def requests(results: Results) -> pd.DataFrame:
    """A row for each request to a server (`_OF_REQUEST`). The baselines of several runs are one setting."""
    rows = []
    for run in results.runs:
        load = run.about["config"].get("load", {})
        many = f"{load.get('concurrency', 1)} at once" if load.get("rate") is None else f"{load['rate']:g} per s"
        limits = {clock: load.get(f"{clock[:4]}_limit_s") or np.inf for clock in _CLOCKS}
        own, theirs = (run.method, str(run.settings), run.label), (BASELINE, "{}", BASELINE)
        for record in run.records if "server" in run.identity else ():
            for side, setting in ((record.method, own), (record.baseline, theirs)):
                if side is not None and side.request is not None:
                    keys = zip(_KEYS, (run.model, DATASETS[record.dataset].suite, *setting, many), strict=True)
                    row: Any = {**vars(side), **vars(side.request), **vars(record), **dict(keys)}
                    rows.append(row | {"is_good": all((row[clock] or 0) <= most for clock, most in limits.items())})
    return in_order(pd.DataFrame(rows, columns=_OF_REQUEST).astype(dict.fromkeys(_CLOCKS, float)))


def _busy_s(group: pd.DataFrame) -> float:
    """Seconds in which at least one of the requests was in progress."""
    ordered = group.sort_values("sent_at")
    until: Any = (ordered["sent_at"] + ordered["end_s"]).cummax()
    return float((until - np.maximum(ordered["sent_at"], until.shift(fill_value=-np.inf))).sum())


def ttft_fit(group: Any) -> tuple[float, float, float]:
    """a, b, c of TTFT = a n^2 + b n + c seconds by least squares; NaN for fewer than three prompt lengths n, or if
    requests may have waited for others."""
    lengths = group["prompt_tokens"].to_numpy(dtype=float)
    if len(set(lengths)) < 3 or (group["load"] != "1 at once").any():
        return float("nan"), float("nan"), float("nan")
    scale = lengths.max()  # else the squares swamp the rest
    a, b, c = np.polyfit(lengths / scale, group["ttft_s"], 2)
    return float(a / scale**2), float(b / scale), float(c)


@styled
def plot(frame: Any) -> MplFigure:
    """A panel for each model: a point for each request, and the fit of each setting."""
    panels, left_out = panels_of(frame, ["model"])
    figure = new_figure(8.5, 3.7 * len(panels), left_out)
    for axes, ((model,), rows) in zip(figure.subplots(len(panels), 1, squeeze=False).flat, panels, strict=True):
        settings = list(rows.groupby(["label", "load"], sort=False))
        for number, ((label, load), group) in enumerate(settings):
            look = look_of(number, len(settings))
            axes.plot(group["prompt_tokens"], 1000 * group["ttft_s"], **look | {"linestyle": "none"}, alpha=0.5)
            a, b, c = ttft_fit(group)
            n = np.linspace(group["prompt_tokens"].min(), group["prompt_tokens"].max())
            known = "" if np.isnan(a) else f": {1e9 * a:.3g} (n/1000)² + {1e6 * b:.3g} n/1000 + {1e3 * c:.3g} ms"
            axes.plot(n, 1000 * (a * n**2 + b * n + c), **look | {"marker": ""}, label=f"{label}, {load}{known}")
        axes.set(title=model, xlabel="prompt tokens", ylabel="TTFT, ms", ylim=(0, None))
        legend_beside(axes)
    return figure


FIGURE = Figure(
    name="serving",
    title="TTFT of servers by prompt length",
    caption=(
        "A point for each request, and TTFT = a n² + b n + c fitted by least squares for each server that got one "
        "request at a time: attention, the other layers, and the constant cost of a request."
    ),
    data=requests,
    plot=plot,
)
