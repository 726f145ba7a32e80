"""One self-contained HTML page of stored runs: lazyllm-bench report RUNS [RUNS ...] [--out runs/report.html]"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eval.store.results import Results, add_choice
from lazyllm.files import write_whole

LARGE_MB = 30


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 0. Raises UserError if there is no page to make."""
    parser = argparse.ArgumentParser(prog="lazyllm-bench report", description=(__doc__ or "").partition(":")[0])
    add_choice(parser)
    parser.add_argument("--out", type=Path, default=Path("runs/report.html"), help="the page (default: %(default)s)")
    parser.add_argument(
        "--records", type=_at_least_one, metavar="N", help="show the first N records of each run and dataset only"
    )
    options = parser.parse_args(argv)
    results = Results.read(options.runs, options.where, options.newest)
    from eval.analysis.registry import SUBJECTS  # not at the top: slow to import
    from eval.report.page import render

    page = render(results, SUBJECTS, options.records)
    write_whole(options.out, page)
    size = len(page.encode()) / 1e6
    print(f"{options.out} ({size:.1f} MB): open it in a browser; it needs no other file")
    if size > LARGE_MB:
        print("A browser loads it slowly: --records N shows the first N records of each run and dataset only")
    return 0


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of 1 or more, got {text}")
    return int(text)
