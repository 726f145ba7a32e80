"""How far a run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

PLAIN_EVERY_S = 10.0  # seconds between lines where there is no terminal


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with the dataset's name after each of `total` examples."""
    console = Console(stderr=True)
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda name: bar.update(task, advance=1, description=name)
        return
    start = last = time.monotonic()
    done = 0

    def line(name: str) -> None:
        nonlocal done, last
        done += 1
        now = time.monotonic()
        if now - last >= PLAIN_EVERY_S or done == total:
            last = now
            remaining = (now - start) / done * (total - done)
            log.info("%d of %d examples (%s), ETA %.0f s", done, total, name, remaining)

    yield line
