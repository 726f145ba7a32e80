"""Ctrl-C ends a run within a second, whatever it is doing, and says how to go on.

Python tells a program of Ctrl-C between two of its own instructions. One operation of a long prefill, weights that are
read, or threads that are waited for at the end, keep it from that. Records are safe at any moment
(`eval.store.folder`), so
that nothing is lost where the process is ended from beside.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

GRACE_S = 0.7  # for the regular way out, which frees the device and writes down when the job ended
STATUS = 130  # as a shell reports a program that Ctrl-C ended
MESSAGE = "stopped: every finished example is safe, and the same command goes on from there"


def end_soon_after_ctrl_c(grace_s: float = GRACE_S) -> None:
    """From now on, end this process with `STATUS` at most `grace_s` after Ctrl-C, if it has not ended by then.

    To be called once, in the main thread of a program of its own. The signal's own handler is left as it is.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # asked for by set_wakeup_fd
    signal.set_wakeup_fd(writer)
    threading.Thread(target=_watch, args=(reader, grace_s), name="ctrl-c", daemon=True).start()


def end() -> NoReturn:
    """End this process with `STATUS` now, and say how to go on; for after Ctrl-C, when all that is open is closed.

    Nothing else is waited for: torch and the threads that it has started keep an interpreter busy for seconds.
    """
    with suppress(OSError, ValueError):  # a reader that Ctrl-C has ended too, or a stream that was closed
        sys.stdout.flush()
    _end()


def _end() -> NoReturn:
    with suppress(OSError, ValueError):
        print(MESSAGE, file=sys.stderr, flush=True)
    os._exit(STATUS)


def _watch(reader: int, grace_s: float) -> None:
    while os.read(reader, 1) != bytes([signal.SIGINT]):
        pass
    threading.Event().wait(grace_s)
    _end()  # standard output is left alone: what does not end may be what holds it
