"""python -m scripts.bench_report FOLDER: a page of benchmark results, with table and pictures.

FOLDER/*.json                   input, from `lazyllm-bench bench --json` or `python -m lazyllm.bench.measure_all FOLDER`
FOLDER/README.md                the table of targets, settings and versions, the pictures
FOLDER/speed.png, .svg, .pdf    TTFT by prompt length, whole generations by answer length

Results of `bench --field` have instead the table of all methods, and field.png, .svg, .pdf: measured against ideal TTFT
speedup. Results of `bench --turn` have the table of second turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as MplFigure

from eval.analysis.figures.style import COLOURS, LINES, MARKERS, grid, new_figure, save, styled
from lazyllm.bench.cases import BenchCase, Pair, cases_of, read_reports
from lazyllm.bench.contenders import table as table_of_field
from lazyllm.bench.targets import table
from lazyllm.bench.turn_two import table as table_of_turns
from lazyllm.bench.turn_two import turn_cases_of
from lazyllm.files import write_whole
from lazyllm.methods import METHODS


@styled
def plot_speed(cases: Sequence[BenchCase]) -> MplFigure:
    """Left: seconds to the first token by prompt length; right: whole generations by answer length."""
    figure = new_figure(9.6, 3.8)
    left, right = figure.subplots(1, 2)
    _plot_first_tokens(left, [case for case in cases if case.untimed is not None])
    _plot_answers(right, [case for case in cases if case.untimed is not None and case.boundaries])
    return figure


def _plot_first_tokens(axes: Any, cases: Sequence[BenchCase]) -> None:
    curve = {case.tokens: case for case in cases if case.name == "paper" and case.new_tokens == 1}
    lengths = sorted(curve)
    baseline = [statistics.median(pair.baseline.ttft_s for pair in curve[n].pairs) for n in lengths]
    lazy = [statistics.median(pair.other.ttft_s for pair in curve[n].pairs) for n in lengths]
    ideal = [seconds / curve[n].ideal_ttft_speedup for seconds, n in zip(baseline, lengths, strict=True)]
    axes.plot(lengths, baseline, color="#000000", marker="X", label="baseline")
    axes.plot(lengths, ideal, color=COLOURS[1], linestyle=LINES[1], label="baseline / ideal speedup")
    axes.plot(lengths, lazy, color=COLOURS[0], marker="o", label="LazyLLM, Figure 4's schedule")
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="seconds to the first token")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=30)
    axes.minorticks_off()
    axes.set_title("One token: time follows FLOPs")
    axes.legend()
    grid(axes)


def _plot_answers(axes: Any, cases: Sequence[BenchCase]) -> None:
    whole = [case for case in cases if all(len(pair.other.step_s) == case.new_tokens - 1 for pair in case.pairs)]
    counts = {
        name: {case.new_tokens for case in whole if case.name == name}
        for name in dict.fromkeys(case.name for case in whole)
    }
    for number, name in enumerate(name for name, lengths in counts.items() if len(lengths) > 1):
        of_method = sorted((case for case in whole if case.name == name), key=lambda case: case.new_tokens)
        tokens = statistics.multimode(case.tokens for case in of_method)[0]
        points = {
            case.new_tokens: statistics.median(case.of_pairs(Pair.total_ratio))
            for case in of_method
            if case.tokens == tokens
        }
        axes.plot(
            points.keys(), points.values(), color=COLOURS[number], marker=MARKERS[number],
            label=f"{name}, {tokens:,} prompt tokens",
        )  # fmt: skip
    axes.axhline(1, color="#000000", linewidth=1)
    lengths = sorted(set().union(*counts.values()))
    axes.set(xscale="log", xlabel="new tokens", ylabel="whole generation / baseline's", ylim=(0, 1.3))
    axes.set_xticks(lengths, map(str, lengths))
    axes.minorticks_off()
    axes.set_title("Whole answers: random weights revive nearly all")
    axes.legend(loc="lower right")
    grid(axes)


@styled
def plot_field(cases: Sequence[BenchCase]) -> MplFigure:
    """Measured against ideal TTFT speedup: a curve for each method and prompt length."""
    figure = new_figure(5.6, 4.4)
    axes = figure.subplots()
    for name, kind in METHODS.items():
        of_method = [case for case in cases if case.name.split()[0] == name]
        for tokens in sorted({case.tokens for case in of_method}):
            ideal, measured = zip(
                *sorted(
                    (case.ideal_ttft_speedup, statistics.median(case.of_pairs(Pair.ttft_speedup)))
                    for case in of_method
                    if case.tokens == tokens
                ),
                strict=True,
            )
            first = tokens == min(case.tokens for case in of_method)
            axes.plot(
                ideal, measured, color=kind.colour, marker=kind.marker, linewidth=1, alpha=1 if first else 0.5,
                label=kind.label if first else None,
            )  # fmt: skip
    highest = 1.05 * max(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot([0, highest], [0, highest], color="#000000", linewidth=0.8, zorder=0)
    lengths = [f"{tokens:,}" for tokens in sorted({case.tokens for case in cases})]
    axes.set(xlabel="ideal TTFT speedup (FLOPs)", ylabel="measured TTFT speedup", xlim=(0, highest), ylim=(0, highest))
    axes.set_title(f"Prompts of {' and '.join(lengths)} tokens" + ("; the longer ones paler" if lengths[1:] else ""))
    axes.legend(loc="lower right", fontsize="small")
    grid(axes)
    return figure


def page_of_field(reports: Sequence[dict[str, Any]]) -> str:
    """The README of a folder of `--field`."""
    return "\n\n".join(
        [
            "# All methods on random weights, measured against ideal",
            "Made by `python -m scripts.bench_report` from the JSON files beside it, which hold every sample. Each "
            "method takes turns with the baseline. The ideal counts FLOPs of the tokens that entered each layer, "
            "scoring and drafts included. With one CPU thread, seconds are the process's CPU time.",
            table_of_field([case for report in reports for case in cases_of(report)]),
            "![Measured against ideal TTFT speedup](field.png)",
            *(_measured_with(report) for report in reports),
        ]
    )


def page_of_turns(reports: Sequence[dict[str, Any]]) -> str:
    """The README of a folder of `--turn`."""
    return "\n\n".join(
        [
            "# The second turn of a session, on random weights",
            "Made by `python -m scripts.bench_report` from the JSON files beside it, which hold every sample. The "
            "second turn follows the prompt and one answer token. Its FLOPs are those of the tokens that it computes, "
            "revived ones included. Medians over rounds of all methods. With one CPU thread, seconds are the process's "
            "CPU time.",
            *(part for report in reports for part in _section_of_turns(report)),
        ]
    )


def _section_of_turns(report: dict[str, Any]) -> list[str]:
    """One file's heading, table and facts: another dtype has another rate."""
    settings = report["settings"]
    return [
        f"## {settings['shape']}, {settings['dtype']}",
        table_of_turns(turn_cases_of(report)),
        _measured_with(report),
    ]


def page(reports: Sequence[dict[str, Any]], has_picture: bool) -> str:
    """The folder's README."""
    return "\n\n".join(
        [
            "# Speed against the targets",
            "Made by `python -m scripts.bench_report` from the JSON files beside it, which hold every sample.",
            table(reports),
            *(["![Time to the first token, and whole generations](speed.png)"] if has_picture else []),
            *(_measured_with(report) for report in reports),
        ]
    )


def _measured_with(report: dict[str, Any]) -> str:
    facts = {key: report[key] for key in ("device", "cpu", "threads", "commit")} | report["versions"]
    shown = ", ".join(f"{key} {value}" for key, value in facts.items() if value is not None)
    given = " ".join(f"{key}={value}" for key, value in report["settings"].items() if value is not None)
    return f"- {shown}: {given}"


def main(arguments: Sequence[str] | None = None) -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    try:
        reports = read_reports(folder)
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"error: {error}")
    if reports[0]["settings"].get("turn"):
        write_whole(folder / "README.md", page_of_turns(reports) + "\n")
        print(f"{folder / 'README.md'}: {len(reports)} files")
        return
    cases = [case for report in reports for case in cases_of(report)]
    if reports[0]["settings"].get("field"):
        save(plot_field(cases), folder / "field", ("png", "svg", "pdf"))
        write_whole(folder / "README.md", page_of_field(reports) + "\n")
        print(f"{folder / 'README.md'}: {len(cases)} cases of {len(reports)} files")
        return
    has_picture = any(case.name == "paper" and case.new_tokens == 1 for case in cases)
    if has_picture:
        save(plot_speed(cases), folder / "speed", ("png", "svg", "pdf"))
    write_whole(folder / "README.md", page(reports, has_picture) + "\n")
    print(f"{folder / 'README.md'}: {len(cases)} cases of {len(reports)} files")


if __name__ == "__main__":
    main()
