"""Servers: percentiles of TTFT and of the time per later token under each load."""

from functools import partial
from typing import Any

import pandas as pd

from eval.analysis.columns import SETTING, in_order
from eval.analysis.table import LABEL, MODEL, Column, Rows, as_table, cells
from eval.store.results import Results

_CLOCKS = {"ttft_s": "TTFT", "step_s": "TPOT"}  # columns of `Results.frame`
_KEYS = [*SETTING, "load"]
_QUANTILES = {f"{_CLOCKS[clock].lower()}_p{n}": (clock, n) for clock in _CLOCKS for n in (50, 90, 99)}
_COLUMNS = (
    MODEL,
    LABEL,
    Column("load", "load"),
    Column("requests", "n"),
    *(Column(name, f"{_CLOCKS[clock]} p{n}, ms", 1, scale=1e-3) for name, (clock, n) in _QUANTILES.items()),
)


@as_table(
    230,
    title="Servers under load",
    caption=(
        "Percentiles over requests (n), one for each turn. TTFT: from just before the request to the first event with "
        "a token."
    ),
    notes=(
        "TPOT: (last - first) / (tokens - 1), as an event may hold several tokens; - if the server does not count "
        "them. Failed requests are left out."
    ),
    command="python run.py model=server server.url=URL model.name=NAME",
)
def serving(results: Results) -> Rows:
    """Each server's times under each load, over the requests of all turns."""
    loads = dict[str, str]()
    for run in results.runs:
        if (load := run.identity.get("load")) is not None:  # of a server
            text = f"{load['concurrency']} at once" if load["rate"] is None else f"{load['rate']:g} per s"
            loads[str(run.folder)] = text
    rows: Any = results.counting
    rows = in_order(rows.assign(load=rows["folder"].map(loads)).dropna(subset="load"))
    quantiles = {name: (clock, partial(pd.Series.quantile, q=n / 100)) for name, (clock, n) in _QUANTILES.items()}
    table = rows.groupby(_KEYS, sort=False).agg(requests=("id", "size"), **quantiles).reset_index()
    return Rows(table, cells(table, _COLUMNS, results), keys=3)
