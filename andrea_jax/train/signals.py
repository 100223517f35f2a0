"""SIGTERM and Ctrl-C ask a run to stop after its current step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """`name` is the signal that asked to stop, or None."""

    name: str | None = None


@contextlib.contextmanager
def stop_on_signal(together: bool = False) -> Iterator[StopRequest]:
    """Catches SIGTERM and SIGINT once; a second Ctrl-C interrupts at once. Only in the main thread.

    `together`: SIGTERM belongs to JAX, which tells all processes of the run; Ctrl-C becomes a SIGTERM.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if together:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            request.name = signal.Signals(number).name

    caught = (signal.SIGINT,) if together else (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, handle) for number in caught}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
