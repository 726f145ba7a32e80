"""Lines of Python by package: python -m scripts.dev.size [COMMIT], with the difference to a commit.

Every line of every tracked file counts, docstrings and blank ones too.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines_of(commit: str | None) -> Counter[tuple[str, str]]:
    """{(package, "code" or "tests"): lines} of a commit, None for the working tree. Raises CalledProcessError."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    named = git("ls-files", "*.py") if commit is None else git("ls-tree", "-r", "--name-only", commit)
    counts = Counter[tuple[str, str]]()
    for name in (name for name in named.split() if name.endswith(".py")):
        folders = name.split("/")[:-1]
        kind = "tests" if folders[:1] == ["tests"] else "code"
        package = "/".join(folders[kind == "tests" :][:2]) or "top"
        if commit is not None:
            counts[package, kind] += git("show", f"{commit}:{name}").count("\n")
        elif (ROOT / name).exists():  # else deleted, and not committed yet
            counts[package, kind] += (ROOT / name).read_bytes().count(b"\n")
    return counts


def main() -> None:
    """Print a line for each package, a folder of `lazyllm` or `eval` or what stands outside both."""
    now, before = lines_of(None), lines_of(sys.argv[1]) if len(sys.argv) > 1 else None
    print(f"{'package':<28}{'code':>16}{'tests':>16}")
    packages = sorted({package for package, _ in {**now, **(before or {})}})
    for name in [*packages, "in all"]:
        cells = []
        for kind in ("code", "tests"):
            here, there = (
                sum(lines for (package, of), lines in counts.items() if of == kind and name in (package, "in all"))
                for counts in (now, before or now)
            )
            cells.append(f"{here:,}" + (f" ({here - there:+,})" if before is not None else ""))
        print(f"{name:<28}{cells[0]:>16}{cells[1]:>16}")


if __name__ == "__main__":
    main()
