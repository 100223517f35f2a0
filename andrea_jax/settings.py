"""What every frozen config shares: a default with a help line, and a check of types, choices and ranges."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import numpy as np

T = TypeVar("T")


class UserError(ValueError):
    """The input was wrong. The message says what, where, and what would be right; scripts print it and exit with 2."""


class RunError(RuntimeError):
    """The run failed. The message says where, what is safe, and what to try; scripts print it and exit with 1."""


def setting(
    default: T, help: str, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> T:
    """A dataclass field with its default, the line that `--help` prints, and the range it must lie in."""
    limits = {"at_least": at_least, "above": above, "at_most": at_most}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def check_fields(config: Any) -> None:
    """Refuses a field of the wrong type, outside its choices or outside its range.

    Integers are accepted, and stored as floats, where a float is expected; NumPy's numbers are stored as Python's.

    Raises:
        UserError: naming the field as a user writes it, its value, and what would be right.
    """
    name = type(config).__name__ if not hasattr(config, "SECTION") else config.SECTION
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        hint = hints[field.name]
        if isinstance(value, np.number):
            value = value.item()
            object.__setattr__(config, field.name, value)
        if type(value) is int and not accepts(hint, value) and abs(value) < 2**1000 and accepts(hint, float(value)):
            value = float(value)
            object.__setattr__(config, field.name, value)
        if not accepts(hint, value):
            raise UserError(f"{name}.{field.name} = {value!r}: expected {_describe(hint, value)}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_range(f"{name}.{field.name}", value, field.metadata)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def accepts(hint: Any, value: Any) -> bool:
    """Whether the value is of the hinted type; an int is no float, and a bool no int."""
    for option in _alternatives(hint):
        if typing.get_origin(option) is Literal:
            if any(value == choice and type(value) is type(choice) for choice in typing.get_args(option)):
                return True
        elif option in (int, float, str, bool, type(None)):
            if type(value) is option:
                return True
        elif typing.get_origin(option) is tuple:
            item = typing.get_args(option)[0]
            if isinstance(value, tuple) and all(accepts(item, element) for element in value):
                return True
    return False


def _describe(hint: Any, value: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", type(None): "None"}
    parts, choices = [], []
    for option in _alternatives(hint):
        if typing.get_origin(option) is Literal:
            choices += [repr(choice) for choice in typing.get_args(option)]
        else:
            parts.append(names.get(option, f"a tuple like {option}"))
    text = " or ".join(choices + parts)
    if int in _alternatives(hint) and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        text += f"; write {value:.0f}"
    if choices and isinstance(value, str):
        close = difflib.get_close_matches(repr(value), choices, n=1)
        text += f"; did you mean {close[0]}?" if close else ""
    return text


def _check_range(name: str, value: float, limits: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} = {value}: must be finite")
    if limits.get("at_least") is not None and value < limits["at_least"]:
        raise UserError(f"{name} = {value}: must be at least {limits['at_least']}")
    if limits.get("above") is not None and value <= limits["above"]:
        raise UserError(f"{name} = {value}: must be above {limits['above']}")
    if limits.get("at_most") is not None and value > limits["at_most"]:
        raise UserError(f"{name} = {value}: must be at most {limits['at_most']}")
