"""Many processes as one run, by JAX's own distributed runtime: joining, agreeing, and ending when one is lost."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from andrea_jax.settings import RunError, UserError, check_fields, setting

AFTER_US = 60  # seconds by which JAX's own limit, whose end is an abort, comes after ours
ASK_EVERY = 2.0  # seconds
NUMBERED_BY = ("JOB_COMPLETION_INDEX", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")  # Kubernetes, Slurm, Open MPI


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """What is given wins over what the launcher says; without either, the process is alone."""

    SECTION: ClassVar[str] = "distributed"
    mode: Literal["auto", "off"] = setting(
        "auto", "auto: join the other processes that Slurm, Open MPI or these settings tell of; off: never"
    )
    coordinator: str | None = setting(None, "HOST:PORT on which process 0 listens; None: from Slurm or Open MPI")
    processes: int | None = setting(None, "processes of the run; None: from Slurm or Open MPI", at_least=1)
    process: int | None = setting(None, "number of this process, from 0; None: from the launcher", at_least=0)
    start_timeout: float = setting(300.0, "seconds to wait until all processes have joined", at_least=10)
    timeout: float = setting(60.0, "seconds without a sign of life after which a process counts as lost", at_least=10)

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.coordinator is None) != (self.processes is None):
            missing = "processes" if self.processes is None else "coordinator"
            raise UserError(f"distributed.{missing} is missing: distributed.coordinator and processes go together")
        if self.process is not None and self.coordinator is None:
            raise UserError(f"distributed.process = {self.process} needs distributed.coordinator and processes")
        if self.processes is not None and self.process is not None and self.process >= self.processes:
            raise UserError(
                f"distributed.process = {self.process}: with distributed.processes = {self.processes} the numbers are "
                f"0 to {self.processes - 1}"
            )
        if self.coordinator is not None:
            _split(self.coordinator)


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(f"distributed.coordinator = {address!r}: expected HOST:PORT, such as 'node1:12345'")
    return host.strip("[]"), int(port)


class Place(NamedTuple):
    """Where a process stands among several; None: JAX asks the launcher."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


def find_place(config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place, or None where a single one was meant. Touches no device.

    Raises:
        UserError: nobody tells the number of this process.
    """
    if config.mode == "off" or config.processes == 1:
        return None
    if config.processes is None:
        counts = [environment.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")]
        return Place() if any(count.isdigit() and int(count) > 1 for count in counts) else None
    numbers = [config.process, *(environment.get(name) for name in NUMBERED_BY)]
    number = next((int(number) for number in numbers if number is not None), None)
    if number is None:
        raise UserError(f"distributed.process is missing: it is not given, and none of {', '.join(NUMBERED_BY)} is set")
    return Place(config.coordinator, config.processes, number)


@contextlib.contextmanager
def joined(config: DistributedConfig, last_saved: Callable[[], str] = lambda: "") -> Iterator[None]:
    """All processes of the run, joined; to be entered before a device is touched. Nothing where one was meant.

    Inside, the loss of a process ends the others within `distributed.timeout`, and a few seconds, by one line that
    names it and `last_saved()`, and exit code 1. Every process must make the same calls in the same order.

    Raises:
        UserError: the coordinator cannot be reached, or not all came.
        RunError: another process was lost.
    """
    place = find_place(config)
    if place is None:
        yield
        return
    _start(config, place)
    over = threading.Event()
    _watch(over, last_saved)
    try:
        yield
        barrier("the end", hours=1)
    except (UserError, RunError) as error:
        _leave_at_once(str(error), 2 if isinstance(error, UserError) else 1)
    except Exception:
        time.sleep(config.timeout + 10)  # where another process is the reason, the watch has ended us by now
        raise
    finally:
        over.set()
    if is_main():
        _client().get_live_nodes(list(range(jax.process_count())))  # returns when the others have left its service
    jax.distributed.shutdown()


def _start(config: DistributedConfig, place: Place) -> None:
    if place.coordinator is not None and place.process:
        _await_coordinator(place.coordinator, config.start_timeout)
    jax.config.update("jax_enable_recoverability", True)  # a lost process is then for us to tell, not an abort
    what = f"not all processes joined within distributed.start_timeout = {config.start_timeout:g} s"
    late = threading.Timer(config.start_timeout, _leave_at_once, [what, 1])
    late.daemon = True
    late.start()
    try:
        jax.distributed.initialize(
            *place,
            initialization_timeout=int(config.start_timeout + AFTER_US),
            heartbeat_timeout_seconds=int(config.timeout),
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"cannot join the other processes: {str(error).splitlines()[0]}") from error
    finally:
        late.cancel()


def _await_coordinator(address: str, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(_split(address), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(
                    f"distributed.coordinator = {address!r} cannot be reached within {seconds:g} s: {error}"
                ) from error
            time.sleep(0.5)


def _watch(over: threading.Event, last_saved: Callable[[], str]) -> None:
    """Ends this process when another one is lost, as JAX's service sees it, or when the service itself is gone."""

    def tell(what: str) -> None:
        if over.is_set():
            return
        if is_main():
            time.sleep(ASK_EVERY + 1)  # whoever outlives the coordinator would hold it to be the one that was lost
        _leave_at_once(f"{what}. {last_saved()}Start all processes again with the same command", 1)

    def ask() -> None:
        everyone = list(range(jax.process_count()))
        while not over.wait(ASK_EVERY):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is ending
                alive = _client().get_live_nodes(everyone)
                if lost := [str(number) for number in everyone if number not in alive]:
                    tell(f"lost process {', '.join(lost)}")

    _on_abort(lambda: tell("process 0, which the others need, was lost"))
    threading.Thread(target=ask, name="andrea_jax.distributed", daemon=True).start()


def _on_abort(act: Callable[[], None]) -> None:
    """JAX's client ends its process by abort() when process 0 is gone: the last chance to say so."""
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: act())
    ctypes.CDLL(None).signal(signal.SIGABRT, handler)
    _KEPT.append(handler)


_KEPT: list[Any] = []  # a callback of ctypes lives as long as its object


def _leave_at_once(text: str, code: int) -> NoReturn:
    """Without JAX's own way out, which waits for the others."""
    print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(code)


def _client() -> Any:
    from jax._src.distributed import global_state  # JAX has these calls in no public place

    return global_state.client


def is_main() -> bool:
    """Whether this process writes files and speaks to the user."""
    return jax.process_index() == 0


def barrier(name: str, hours: float = 24) -> None:
    """Waits until every process is here; the loss of one ends the run."""
    if jax.process_count() > 1:
        _client().wait_at_barrier(f"{name} {next(_NUMBERS)}", int(hours * 3_600_000))


_NUMBERS = itertools.count()  # a barrier's name is used once


@contextlib.contextmanager
def main_first(name: str) -> Iterator[None]:
    """Process 0 runs the body before the others, who then find what it left on the shared disk."""
    if not is_main():
        barrier(name)
    yield
    if is_main():
        barrier(name)


def gather(value: Any) -> list[Any]:
    """The JSON values of all processes, in their order."""
    if jax.process_count() == 1:
        return [value]
    text = json.dumps(value).encode()
    size = int(multihost_utils.process_allgather(np.int32(len(text))).max())
    padded = np.frombuffer(text.ljust(size), np.uint8)
    return [json.loads(row.tobytes()) for row in np.asarray(multihost_utils.process_allgather(padded))]


def agree(values: dict[str, Any]) -> None:
    """Raises UserError, in every process, with the first name whose values differ between processes, and both."""
    first, *others = gather(values)
    for number, other in enumerate(others, start=1):
        for name in first | other:
            if first.get(name) != other.get(name):
                raise UserError(
                    f"the processes do not agree: {name} is {first.get(name)!r:.80} in process 0 "
                    f"and {other.get(name)!r:.80} in process {number}"
                )


def agreed_stop(step: int) -> bool:
    """To be called after each step: whether a process was asked by SIGTERM to stop, the same in all after one step."""
    return jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)
