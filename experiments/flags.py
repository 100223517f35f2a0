"""The command line of every script: absl flags, gin settings, --help, --print_config, errors and exit codes."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import signal
import sys
import typing
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from absl import flags as absl_flags
from absl import logging as absl_logging
from gin_settings import run_config
from settings_table import SECTIONS, SETTINGS, check_name, format_config, format_help, help_row, names_in

from andrea_jax.checkpoint import Weights
from andrea_jax.settings import RunError, UserError, nearest
from andrea_jax.train.config import RunConfig

__all__ = ["bound_fields", "define_weights", "format_config", "main", "run_config"]

Run = Callable[[RunConfig, dict[str, str]], int | None]


def main(
    run: Run,
    description: str,
    script_flags: absl_flags.FlagValues | None = None,
    uses: Iterable[str] = tuple(SECTIONS),
    argv: Sequence[str] | None = None,
    arguments: Sequence[str] = (),
) -> NoReturn:
    """Reads the command line, calls `run(config, bound)` and exits: 0 or what it returned, 1 failed, 2 wrong input.

    `bound` maps each setting that the user bound to where. `script_flags` holds the script's own flags. `uses` names
    the sections and settings that the script reads: others are refused as flags, and noted when a gin file binds them.
    `arguments` are the flags whose values may be given without their names, in this order.
    """
    _silence_libraries()
    if argv is None:  # a script of its own, not a call within another program
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _leave)
    argv, names = list(argv or sys.argv), names_in(uses)
    own = absl_flags.FlagValues() if script_flags is None else script_flags
    try:
        _define_gin_flags(own)
        if {"--help", "-help", "-h"} & set(argv[1:]):
            print(_help(description, argv[0], own, names, arguments))
            sys.exit(0)
        _parse(argv, own, arguments)
        given = {name: own[f"gin.{name}"].value[0] for name in SETTINGS if own[f"gin.{name}"].present}
        config, bound = run_config(own["gin_file"].value, own["gin_bindings"].value, given)
        _check_used(bound, names, Path(argv[0]).name)
        if own["print_config"].value:
            print(format_config(config, names), end="")
            sys.exit(0)
        sys.exit(run(config, bound) or 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def bound_fields(section: str, config: RunConfig, bound: Collection[str]) -> dict[str, Any]:
    """{field: value} of what the user bound in a section of RunConfig, such as `data`."""
    values, prefix = getattr(config, section), section + "."
    return {field: getattr(values, field) for field in (n.removeprefix(prefix) for n in bound if n.startswith(prefix))}


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Ends at once, with 128 + number: an exception could be lost in a callback, and Python's own way out crashes
    while XLA compiles. Training replaces this while there is something to save."""
    print(f"interrupted by {signal.Signals(number).name}; nothing more was saved", file=sys.stderr, flush=True)
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(128 + number)


def define_weights(own: absl_flags.FlagValues, of: str = "") -> absl_flags.FlagHolder[str]:
    """--weights: which parameters of a checkpoint a script takes."""
    help_text = f"{of}those averaged by train.ema, those of the last step, or (auto) the average where there is one"
    return absl_flags.DEFINE_enum("weights", "auto", typing.get_args(Weights), help_text, flag_values=own)


def _silence_libraries() -> None:
    """Keeps what Orbax and JAX say to developers away from users; `python -W default` brings the warnings back.

    Orbax logs the traceback of a failed write from a thread of its own, and raises the error for us to report.
    """
    absl_logging.set_verbosity(absl_logging.FATAL)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module=r"(jax|flax|optax|orbax|etils|grain)\b")
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
    sys.excepthook, sys.unraisablehook = _report_uncaught, _report_unraisable


# Of several reads or writes of a checkpoint that fail at once, Orbax raises one, which we report; the coroutines and
# threads of the others complain when its event loop is gone.
LATE = "Event loop is closed"


def _report_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if str(error) != LATE:
        sys.__excepthook__(kind, error, trace)


def _report_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    if str(unraisable.exc_value) != LATE and not inspect.iscoroutine(unraisable.object):
        sys.__unraisablehook__(unraisable)


def _define_gin_flags(own: absl_flags.FlagValues) -> None:
    for name in own:
        own[name].unparse()  # a second call in one process starts afresh
    if "gin_file" in own:
        return
    absl_flags.DEFINE_multi_string("gin_file", [], "settings file, or a name in experiments/configs", own)
    absl_flags.DEFINE_multi_string("gin_bindings", [], "a setting, as 'NAME = VALUE'", own)
    absl_flags.DEFINE_bool("print_config", False, "print every setting as it would be used, and stop", own)
    absl_flags.DEFINE_bool("help", False, "print this text, and stop", own)
    for name, setting in SETTINGS.items():
        absl_flags.DEFINE_multi_string(f"gin.{name}", [], setting.help, own)


def _parse(argv: list[str], own: absl_flags.FlagValues, arguments: Sequence[str] = ()) -> None:
    try:
        rest = own(argv)
        for name, value in zip(arguments, rest[1:], strict=False):
            own[name].parse(value)
        rest[1 : 1 + len(arguments)] = []
    except absl_flags.UnrecognizedFlagError as error:
        raise UserError(_unknown_flag(error.flagname, own)) from None
    except (absl_flags.Error, ValueError) as error:
        raise UserError(_flag_error(str(error))) from None
    if len(rest) > 1:
        hint = f"; settings are given as --gin.{rest[1]}" if rest[1].partition("=")[0] in SETTINGS else ""
        raise UserError(f"unexpected argument {rest[1]!r}{hint}")
    for name in own:
        once = name.startswith("gin.") or not isinstance(own[name], absl_flags.MultiFlag)
        if once and own[name].present > 1:
            raise UserError(f"--{name} is given {own[name].present} times: {' and '.join(_given(argv, own[name]))}")


def _unknown_flag(name: str, own: absl_flags.FlagValues) -> str:
    if name.startswith("gin."):
        check_name(name.removeprefix("gin."), f"--{name}")
    same = [f"--gin.{known}" for known in SETTINGS if known.endswith("." + name.rpartition(".")[2])]
    if same:
        return f"no flag --{name}; did you mean {' or '.join(same)}?"
    hint = nearest(f"--{name}", [f"--{known}" for known in own])
    return f"no flag --{name}{hint if 'did you mean' in hint else '; --help lists them'}"


def _flag_error(message: str) -> str:
    """What absl says, without its noise."""
    message = message.rpartition("=None: ")[2].removeprefix("flag ")
    return message.partition(": (")[0] + ": expected true or false" if "Non-boolean" in message else message


def _given(argv: list[str], flag: absl_flags.Flag) -> list[str]:
    """Every value of one flag, as typed."""
    values = []
    for argument, following in zip(argv[1:], [*argv[2:], ""], strict=True):
        key, equals, value = argument.partition("=")
        if argument.startswith("-") and key.lstrip("-") in (flag.name, "no" + flag.name):
            values.append(value if equals else argument if flag.boolean else following)
    return values


def _check_used(bound: dict[str, str], names: Collection[str], script: str) -> None:
    unused = {name: where for name, where in bound.items() if name not in names}
    for name, where in unused.items():
        if where.startswith("--"):
            raise UserError(f"{where}: {name} would never be used: {script} does not read it")
    if unused:
        sections = sorted({name.rpartition(".")[0] for name in unused})
        print(f"note: {script} does not use what the gin files say on {', '.join(sections)}", file=sys.stderr)


def _help(
    description: str, script: str, own: absl_flags.FlagValues, names: Collection[str], arguments: Sequence[str] = ()
) -> str:
    flags = [own[name] for name in own if not name.startswith("gin.")]
    flag_rows = [
        (f"--{flag.name}", "" if flag.default in (None, []) else repr(flag.default), flag.help) for flag in flags
    ]
    rows = [help_row(setting) for name, setting in SETTINGS.items() if name in names]
    given = "".join(f" {name.upper()}" for name in arguments)
    text = f"""usage: python {script}{given} [--FLAG=VALUE ...] [--gin_file=FILE] [--gin.NAME=VALUE ...]

{description.strip()}

Flags:
{format_help(flag_rows)}"""
    places = "Settings, given as --gin.NAME=VALUE, as --gin_bindings='NAME = VALUE', or as NAME = VALUE in a file:"
    return f"{text}\n\n{places}\n{format_help(rows)}" if rows else text
