"""The page of `lazyllm-bench paper` alone, in one file that needs no other: lazyllm-bench report RUNS [--out PAGE]"""

from collections.abc import Sequence
from pathlib import Path

from eval.store.results import Results, add_choice
from lazyllm.errors import parser_of, require
from lazyllm.files import write_whole


def main(arguments: Sequence[str]) -> int:
    """The command `report`. Returns the exit code. Raises UserError."""
    parser = parser_of("report", __doc__)
    add_choice(parser)
    parser.add_argument("--out", type=Path, metavar="PAGE", help="default: report.html beside the runs")
    parser.add_argument("--examples", type=int, metavar="N", help="show only the first N examples of a run and dataset")
    options = parser.parse_args(arguments)
    require(options.examples is None or options.examples > 0, "--examples", options.examples, "1 or more")
    results = Results.read(options.runs, options.where, options.newest)
    from eval.analysis.table import figures, tables  # not at the top: slow to import
    from eval.report.content import content_of
    from eval.report.page import render

    page = render(results, content_of(results, tables(), figures()), options.examples)
    out = options.out or options.runs[0] / "report.html"
    write_whole(out, page)
    size = len(page.encode()) / 1e6
    print(f"{out} ({size:.1f} MB): open it in a browser; it needs no other file")
    if size > 30:
        print("A browser loads it slowly: --examples N shows the first N of each run and dataset only")
    return 0
