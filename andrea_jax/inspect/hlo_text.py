"""XLA's optimized HLO text as computations of instructions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from andrea_jax.layers.expert_product import BEYOND

HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) .*\{$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
CALLING = ("while", "call", "fusion", "async-start", "conditional")
CALLED = ("calls", "to_apply", "body", "true_computation", "false_computation", "branch_computations")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = type opcode(arguments), attributes`."""

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)

    @property
    def arrays(self) -> list[tuple[str, tuple[int, ...]]]:
        """Dtype and sizes of the result, or of each part of a tuple."""
        return [(dtype, tuple(map(int, filter(None, sizes.split(","))))) for dtype, sizes in ARRAY.findall(self.type)]

    @property
    def bytes(self) -> int:
        return sum(array_bytes(*array) for array in self.arrays)

    @property
    def called(self) -> list[str]:
        """The computations it calls, without a loop's condition."""
        text = "".join(re.findall(rf"\b(?:{'|'.join(CALLED)})=(\{{[^}}]*\}}|%[\w.\-]+)", self.attributes))
        return re.findall(r"%([\w.\-]+)", text)

    def attribute(self, pattern: str) -> str:
        """The first group of the pattern in the attributes, or an empty text."""
        found = re.search(pattern, self.attributes)
        return found.group(1) if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    instructions: dict[str, Instruction]
    root: Instruction

    def users(self, name: str) -> list[Instruction]:
        return [user for user in self.instructions.values() if name in user.operands]

    def behind_views(self, value: Instruction) -> Instruction:
        """The value that a chain of bitcasts starts from."""
        while value.opcode == "bitcast":
            value = self.instructions[value.operands[0]]
        return value

    def parameter(self, number: int) -> Instruction:
        return next(i for i in self.instructions.values() if i.opcode == "parameter" and i.arguments == str(number))


def array_bytes(dtype: str, sizes: tuple[int, ...]) -> int:
    """Bytes of an array: the first number in the dtype's name is its bits; pred is a byte, a token nothing."""
    bits = {"pred": 8, "token": 0, "opaque": 0}.get(dtype)
    if bits is None:
        bits = int(re.findall(r"\d+", dtype)[0])
    return math.ceil(bits * math.prod(sizes) / 8)


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] = {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if header := HEADER.match(line):
            name, instructions = header.group(2), {}
            entry = name if header.group(1) else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(instructions, instructions[root])
        elif name and (found := INSTRUCTION.match(line)):
            instructions[found.group(2)] = _instruction(found.group(2), found.group(3))
            root = found.group(2) if found.group(1) else root
    return computations, entry


def executed(
    computations: dict[str, Computation], name: str, times: int = 1
) -> Iterator[tuple[Computation, Instruction, int]]:
    """Each instruction under the computation `name`, with its computation and how often it runs.

    A loop's body counts as often as the loop runs; of a conditional all branches count.

    Raises:
        ValueError: a loop whose trip count is not known.
    """
    for i in computations[name].instructions.values():
        yield computations[name], i, times
        if i.opcode in CALLING:
            for called in i.called:
                yield from executed(computations, called, times * trips(i))


def trips(i: Instruction) -> int:
    """How often what `i` calls runs each time that `i` runs: never, if it is for uneven loads of experts alone."""
    if i.opcode != "while":
        return 1
    if BEYOND in i.attribute(r'op_name="([^"]*)"'):
        return 0
    count = i.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if not count:
        raise ValueError(f"{i.name}: a loop whose trip count is not known")
    return int(count)


def numbers(text: str) -> list[int]:
    """The whole numbers in a text."""
    return [int(number) for number in re.findall(r"\d+", text)]


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    opening = text.index("(", end)
    closing = _closing(text, opening)
    return Instruction(name, text[:end], text[end:opening].strip(), text[opening + 1 : closing - 1], text[closing:])


def _closing(text: str, start: int) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise ValueError(f"a parenthesis stays open: {text}")
