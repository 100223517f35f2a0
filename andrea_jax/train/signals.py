"""SIGTERM and Ctrl-C ask a run to stop after its current step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopRequest:
    """`name` is the signal that asked to stop, or None."""

    name: str | None = None


@contextlib.contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Catches SIGTERM and SIGINT once; a second Ctrl-C interrupts at once. Only in the main thread."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        request.name = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
