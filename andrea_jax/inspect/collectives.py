"""What a compiled step sends between devices, read from its optimized HLO."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from andrea_jax.inspect.hlo_text import Instruction, executed, numbers, parse

# bytes that each of n devices sends for one byte of its operand, in a ring: no other way sends fewer
SENT: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-broadcast": lambda n: 1,
    "collective-permute": lambda n: 1,
}
KINDS = re.compile(rf"({'|'.join(SENT)})(-start)?")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective: the axes of the mesh that its groups lie along, and a group's devices, in all and on a host."""

    kind: str
    axes: tuple[str, ...]
    devices: int
    on_a_host: int
    operand_bytes: int
    times: int

    @property
    def sent(self) -> float:
        """Bytes that each device sends in a step."""
        return self.times * self.operand_bytes * SENT[self.kind](self.devices)

    @property
    def between_hosts(self) -> bool:
        return self.on_a_host < self.devices


def collectives_of(text: str, mesh: Mapping[str, int], gpus_per_host: int) -> list[Collective]:
    """The collectives of an HLO text that is compiled for the devices of a mesh of these sizes, hosts one by one."""
    computations, entry = parse(text)
    found = []
    for computation, i, times in executed(computations, entry):
        if kind := KINDS.fullmatch(i.opcode):
            groups = device_groups(i, math.prod(mesh.values()))
            on_a_host = max(int(np.unique(group // gpus_per_host, return_counts=True)[1].min()) for group in groups)
            operands = sum(computation.instructions[name].bytes for name in i.operands)
            found.append(Collective(kind.group(1), _axes(groups, mesh), groups.shape[1], on_a_host, operands, times))
    return [collective for collective in found if collective.axes]


def device_groups(i: Instruction, devices: int) -> np.ndarray:
    """[groups, devices of a group]: the devices that a collective joins, by their places in the mesh.

    XLA writes them as lists, `{{0,1},{2,3}}`, as the rows of a transposed count, `[2,2]<=[2,2]T(1,0)`, or as axes of a
    mesh of its own, `mesh['a'=2,'b'=2] {'b'}`, of which an axis may be cut: `'a':(2)4`.
    """
    pairs = i.attribute(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
    if pairs:
        return np.array([numbers(pair) for pair in re.findall(r"\{([\d,]+)\}", pairs)])
    if lists := i.attribute(r"replica_groups=\{(\{[\d,{}]*\})\}"):
        return np.array([numbers(group) for group in re.findall(r"\{([\d,]+)\}", lists)])
    if counted := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", i.attributes):
        return _transposed_count(counted.group(2)).reshape(numbers(counted.group(1)))
    named = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", i.attributes)
    if named is None:
        return np.arange(devices)[None]  # `replica_groups={}`: all
    return _groups_of_axes(*named.groups())


def _groups_of_axes(axes: str, order: str | None, grouped: str) -> np.ndarray:
    """Groups from the axes of a mesh, the order of its devices, and the axes, or parts of axes, that are joined."""
    sizes = {name: int(size) for name, size in re.findall(r"('[^']+'|\w+)=(\d+)", axes)}
    if order is None:
        mesh = np.arange(math.prod(sizes.values()))
    else:
        mesh = _transposed_count(order) if "T(" in order else np.array(numbers(order))
    parts = re.findall(r"('[^']+'|\w+)(?::\((\d+)\)(\d+))?", grouped)
    cut = {name: [(int(pre or 1), int(size or sizes[name])) for n, pre, size in parts if n == name] for name in sizes}
    shape: list[int] = []
    joined: list[int] = []
    for name, size in sizes.items():
        done = 1
        for pre, part in sorted(cut[name]):
            shape += [pre // done, part]
            joined.append(len(shape) - 1)
            done = pre * part
        shape.append(size // done)
    each = math.prod(shape[axis] for axis in joined)
    return np.moveaxis(mesh.reshape(shape), joined, range(-len(joined), 0)).reshape(-1, each)


def _transposed_count(text: str) -> np.ndarray:
    """0, 1, 2, ... in the shape `[2,3]`, its axes then in the order `T(1,0)`, flat."""
    shape, _, order = text.partition("T")
    count = np.arange(math.prod(numbers(shape))).reshape(numbers(shape))
    return (count.transpose(numbers(order)) if order else count).reshape(-1)


def _axes(groups: np.ndarray, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of our mesh along which the devices of a group differ."""
    places = np.unravel_index(groups, tuple(mesh.values()))
    return tuple(name for name, at in zip(mesh, places, strict=True) if (at != at[:, :1]).any())
