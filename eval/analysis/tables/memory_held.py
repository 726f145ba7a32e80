"""KV cache, Aux Cache and peak memory by method."""

from __future__ import annotations

import numpy as np
import pandas as pd

from eval.analysis.table import Table
from eval.analysis.tables.cells import SETTING, forms, model_name, overall, shown
from eval.store.results import Results

_MB = 1e6
_COLUMNS = ("kv_bytes", "aux_bytes", "cache_bytes", "peak_memory_bytes")


def memory(results: Results) -> Table:
    """KV cache, Aux Cache and peak memory of every setting, beside the paired baseline on the same examples."""
    frame = overall(results)
    frame["cache_ratio"] = frame["cache_bytes"] / frame["baseline_cache_bytes"]
    frame["peak_ratio"] = frame["peak_memory_bytes"] / frame["baseline_peak_memory_bytes"]
    baseline = [f"baseline_{name}" for name in _COLUMNS]
    frame = frame[[*SETTING, "examples", "seeds", *forms(*_COLUMNS), *baseline, "cache_ratio", "peak_ratio"]]
    lines = []
    for row in frame.to_dict("records"):
        peak = row["peak_memory_bytes"]
        lines.append(
            {
                "model": model_name(row, results),
                "method": row["label"],
                "n": str(row["examples"]),
                "KV cache, MB": shown(row, "kv_bytes", 3, _MB),
                "Aux Cache, MB": shown(row, "aux_bytes", 3, _MB),
                "both, MB": shown(row, "cache_bytes", 3, _MB),
                "both / baseline": _ratio(row["cache_ratio"]),
                "peak, MB": "not known" if np.isnan(peak) else shown(row, "peak_memory_bytes", 1, _MB),
                "peak / baseline": _ratio(row["peak_ratio"]),
            }
        )
    caption = (
        "Mean over tasks, MB = 10^6 bytes. KV cache and Aux Cache: at the end of a generation. Ratios: to the "
        "paired baseline on the same examples. Peak: during a generation, weights included; on a GPU the allocated "
        "memory, on a CPU the process's resident memory, with Python and its libraries. ±: half of the 95 % bootstrap "
        "interval over examples. unpaired: no baseline was run beside the method."
    )
    title = "Memory: KV cache, Aux Cache and peak by method"
    return Table("memory", title, caption, frame, pd.DataFrame(lines), keys=2)


def _ratio(value: float) -> str:
    return "unpaired" if np.isnan(value) else f"{value:.3f}"
