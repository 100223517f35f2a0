"""Bytes that a compiled function moves through GPU memory, kernel by kernel, read from its optimized HLO.

A kernel reads each operand once and writes each result once; what it reads twice is taken to hit the cache. Of an
operand that is only sliced, the slice counts; of a result that is an operand updated in place, the update counts.
Views, tuples, parameters and constants cost nothing; a loop's body counts as often as the loop runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from andrea_jax.inspect.hlo_text import Computation, Instruction, array_bytes, parse, trips

FREE = [
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "opt-barrier",
    "partition-id",
    "replica-id",
]
CALLS = ("call", "async-start")
COPIES = ("copy", "copy-start", "transpose")
STARTS = ("copy-start", "all-gather-start", "collective-permute-start")  # results hold the operand too
SLICES = ("slice", "dynamic-slice", "gather")
UPDATES = ("dynamic-update-slice", "scatter")
TARGETS = {"cublas": "gemm", "fmha": "attention", "triton": "pallas", "mosaic": "pallas"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch site: bytes read and written by one launch, and how often it is launched."""

    name: str
    kind: str
    op_name: str
    read: int
    written: int
    times: int = 1

    @property
    def bytes(self) -> int:
        return self.times * (self.read + self.written)


def bytes_of(compiled: Any) -> list[Kernel]:
    """The kernels of a compiled function (or of its HLO text), in the order they run.

    Raises:
        ValueError: a loop whose trip count is not known.
    """
    computations, entry = parse(compiled if isinstance(compiled, str) else compiled.as_text())
    return _kernels(computations, computations[entry], 1)


def total(kernels: list[Kernel]) -> int:
    return sum(kernel.bytes for kernel in kernels)


def _kernels(computations: dict[str, Computation], computation: Computation, times: int) -> list[Kernel]:
    kernels = []
    for i in computation.instructions.values():
        called = [computations[name] for name in i.called]
        if i.opcode == "while":
            kernels += _kernels(computations, called[0], times * trips(i))
        elif i.opcode in CALLS:
            kernels += _kernels(computations, called[0], times)
        elif i.opcode == "conditional":
            kernels += max((_kernels(computations, branch, times) for branch in called), key=total)
        elif i.opcode not in FREE and not i.opcode.endswith(("-done", "-update")):
            read = sum(_read(computations, computation, i, name) for name in dict.fromkeys(i.operands))
            written = _written(computations, computation, i)
            op_name = i.attribute(r'op_name="([^"]*)')
            kernels.append(Kernel(i.name, _kind(computations, i), op_name, read, written, times))
    return kernels


def _read(computations: dict[str, Computation], computation: Computation, user: Instruction, name: str) -> int:
    """Bytes that `user` reads of its operand `name`."""
    size = computation.instructions[name].bytes
    if user.opcode == "fusion":
        body = computations[user.called[0]]
        parameters = [body.parameter(n).name for n, operand in enumerate(user.operands) if operand == name]
        return min(size, sum(_read_inside(computations, body, parameter) for parameter in parameters))
    if user.operands.index(name) > 0:
        return size
    if user.opcode in SLICES:
        dtype, _ = computation.instructions[name].arrays[0]
        return array_bytes(dtype, user.arrays[0][1])
    if user.opcode in UPDATES:  # a scatter adds to what it finds
        return _updated_bytes(computation, user) if user.opcode == "scatter" else 0
    return size


def _read_inside(computations: dict[str, Computation], body: Computation, name: str) -> int:
    """Bytes that the users of a value inside a fusion read of it, seen through views."""
    users = body.users(name)
    views = [user.name for user in users if user.opcode == "bitcast" and user is not body.root]
    return sum(_read_inside(computations, body, view) for view in views) + sum(
        _read(computations, body, user, name) for user in users if user.name not in views
    )


def _written(computations: dict[str, Computation], computation: Computation, i: Instruction) -> int:
    if i.opcode in UPDATES:
        return _updated_bytes(computation, i)
    if i.opcode in STARTS:
        return computation.instructions[i.operands[0]].bytes
    if i.opcode == "custom-call" and i.type.startswith("("):  # flat arrays of bytes are a library's workspace
        return sum(array_bytes(*array) for array in i.arrays if array[0] not in ("s8", "u8") or len(array[1]) != 1)
    if i.opcode != "fusion":
        return i.bytes
    body = computations[i.called[0]]
    results = body.root.operands if body.root.opcode == "tuple" else [body.root.name]
    return sum(_result_bytes(body, body.instructions[name]) for name in results)


def _result_bytes(body: Computation, result: Instruction) -> int:
    """Bytes written for one result of a fusion: the update alone where a parameter is updated in place."""
    value = body.behind_views(result)
    in_place = value.opcode in UPDATES and body.behind_views(body.instructions[value.operands[0]]).opcode == "parameter"
    return _updated_bytes(body, value) if in_place else result.bytes


def _updated_bytes(computation: Computation, update: Instruction) -> int:
    """Bytes of the part that a dynamic-update-slice (target, part, ...) or scatter (target, indices, part) replaces."""
    return computation.instructions[update.operands[1 if update.opcode == "dynamic-update-slice" else 2]].bytes


def _kind(computations: dict[str, Computation], i: Instruction) -> str:
    """gemm, attention, pallas, copy, fusion, or the opcode."""
    if i.opcode == "custom-call":
        target = i.attribute('custom_call_target="([^"]*)"')
        return next((kind for part, kind in TARGETS.items() if part in target), target)
    if i.opcode != "fusion":
        return "copy" if i.opcode in COPIES else i.opcode
    inside = [x for x in computations[i.called[0]].instructions.values() if x.opcode not in FREE]
    kinds = {_kind(computations, x) for x in inside}
    if kinds & {"dot", "convolution", "gemm"}:
        return "gemm"
    return "copy" if kinds == {"copy"} else "fusion"
