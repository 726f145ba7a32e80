"""Lines of Python by package, docstrings and blank ones too: python -m scripts.dev.size [COMMIT to compare with]"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines_of(*commit: str) -> Counter[tuple[str, str]]:
    """{(package or "in all", "code" or "tests"): lines} of a commit, or of the working tree."""
    command = ["git", "grep", "--count", "", *commit, "--", "*.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    counts = Counter[tuple[str, str]]()
    for line in found.splitlines():
        *_, name, lines = line.split(":")
        folders = name.split("/")[:-1]
        kind = "tests" if folders[:1] == ["tests"] else "code"
        for package in ("/".join(folders[kind == "tests" :][:2]) or "top", "in all"):
            counts[package, kind] += int(lines)
    return counts


def main() -> None:
    """Print a line for each package, a folder of `lazyllm` or `eval` or what stands outside both."""
    now, before = lines_of(), lines_of(*sys.argv[1:])
    print(f"{'package':<28}{'code':>16}{'tests':>16}")
    for name in [*sorted({package for package, _ in now | before} - {"in all"}), "in all"]:
        code, tests = (
            f"{now[name, kind]:,}" + (f" ({now[name, kind] - before[name, kind]:+,})" if sys.argv[1:] else "")
            for kind in ("code", "tests")
        )
        print(f"{name:<28}{code:>16}{tests:>16}")


if __name__ == "__main__":
    main()
