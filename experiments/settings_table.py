"""Every setting of a run: its section, name, type, default and help line, all read from RunConfig."""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple

from andrea_jax.config import ModelConfig
from andrea_jax.presets import PRESETS
from andrea_jax.settings import UserError, nearest
from andrea_jax.train.config import RunConfig

DEFAULT_PRESET = "andrea_nano"


class Setting(NamedTuple):
    """A field of a section, named as users write it: `train.steps`."""

    name: str
    hint: Any
    default: Any
    help: str


def make_model(preset: str = DEFAULT_PRESET, **changes: Any) -> ModelConfig:
    """A preset with some fields replaced.

    Raises:
        UserError: an unknown preset, or fields that do not form a model.
    """
    if preset not in list(PRESETS):
        raise UserError(f"ModelConfig.preset = {preset!r}: no such preset{nearest(str(preset), PRESETS)}")
    return PRESETS[preset](**changes)


def _sections() -> dict[str, tuple[str, type]]:
    """Section as users write it -> the field of RunConfig, and its class."""
    hints = typing.get_type_hints(RunConfig)
    fields = [(field.name, hints[field.name]) for field in dataclasses.fields(RunConfig)]
    return {"ModelConfig" if name == "model" else name: (name, kind) for name, kind in fields}


def _settings() -> dict[str, Setting]:
    preset_help = f"the model whose fields the others replace: {', '.join(PRESETS)}"
    listed = [Setting("ModelConfig.preset", str, DEFAULT_PRESET, preset_help)]
    run = RunConfig()
    for section, (name, kind) in SECTIONS.items():
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            default, help = getattr(getattr(run, name), field.name), field.metadata["help"]
            listed.append(Setting(f"{section}.{field.name}", hints[field.name], default, help))
    return {setting.name: setting for setting in listed}


SECTIONS = _sections()
SETTINGS = _settings()
MAKERS: dict[str, Callable[..., Any]] = {section: kind for section, (_, kind) in SECTIONS.items()}
MAKERS["ModelConfig"] = make_model


def check_name(name: str, where: str) -> None:
    """Refuses a name that is no setting.

    Raises:
        UserError: with the same field of another section, or the nearest name.
    """
    if name in SETTINGS:
        return
    section, _, field = name.rpartition(".")
    same = [known for known in SETTINGS if known.endswith("." + field)]
    if same:
        raise UserError(f"{where}: no setting {name}; did you mean {' or '.join(same)}?")
    if section in SECTIONS:
        raise UserError(f"{where}: no setting {name}{nearest(name, names_in([section]))}")
    hint = nearest(name, SETTINGS)
    raise UserError(f"{where}: no setting {name}{hint if 'did you mean' in hint else nearest(section, SECTIONS)}")


def names_in(uses: Iterable[str]) -> set[str]:
    """The settings that `uses` names, whole sections or single settings: `["data", "ModelConfig.vocab_size"]`."""
    wanted = set(uses)
    unknown = wanted - SECTIONS.keys() - SETTINGS.keys()
    if unknown:
        raise ValueError(f"neither sections nor settings: {unknown}")
    return {name for name in SETTINGS if name in wanted or name.rpartition(".")[0] in wanted}


def format_config(config: RunConfig, names: Collection[str] = SETTINGS) -> str:
    """The named settings as gin text; that of all of them reads back to an equal config."""
    blocks = []
    for section, (field, _) in SECTIONS.items():
        values = dataclasses.asdict(getattr(config, field))
        lines = [f"{section}.{key} = {value!r}" for key, value in values.items() if f"{section}.{key}" in names]
        blocks += ["\n".join([f"# {section}", *lines, ""])] if lines else []
    return "\n".join(blocks)


def format_help(rows: Iterable[tuple[str, str, str]], width: int = 100) -> str:
    """Aligned columns of name, default and help; the last is wrapped."""
    rows = list(rows)
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    margin = " " * (first + second + 6)
    lines = []
    for name, default, help in rows:
        start = f"  {name:{first}}  {default:{second}}  "
        lines.append(
            textwrap.fill(start + " ".join(help.split()), width, subsequent_indent=margin, break_long_words=False)
        )
    return "\n".join(lines)


def help_row(setting: Setting) -> tuple[str, str, str]:
    """Name, default and help, with the choices where there are some."""
    choices = typing.get_args(setting.hint) if typing.get_origin(setting.hint) is Literal else ()
    return setting.name, repr(setting.default), setting.help + (f" ({' | '.join(choices)})" if choices else "")
