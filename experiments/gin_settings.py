"""Settings from gin files, bindings and flags. The only module that knows gin."""

from __future__ import annotations

import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gin
from gin import config_parser
from settings_table import MAKERS, SECTIONS, SETTINGS, check_name

from andrea_jax.settings import UserError, accepts, nearest
from andrea_jax.train.config import RunConfig

CONFIGS = Path(__file__).parent / "configs"

for _section, _maker in MAKERS.items():
    gin.external_configurable(_maker, name=_section, module="andrea_jax")


class Binding(NamedTuple):
    """What a place says about a setting (`train.steps`) or a macro (`width`)."""

    value: Any
    where: str


def run_config(
    gin_files: Iterable[str] = (), bindings: Iterable[str] = (), flags: Mapping[str, str] | None = None
) -> tuple[RunConfig, dict[str, str]]:
    """The settings of a run, and where each one that the user bound was bound: `{"train.steps": "nano.gin, line 3"}`.

    Files override one another in their order, then come `bindings`, then `flags` (`{"train.steps": "100"}`). Gin's own
    configuration is empty afterwards.

    Raises:
        UserError: a name, value, file or macro that is wrong, bound twice in one place, or without effect.
    """
    macros = _Macros()
    bound: dict[str, Binding] = {}
    for name in gin_files:
        bound |= _read_file(_find_file(name, Path(), f"--gin_file={name}"), macros)
    own: dict[str, Binding] = {}
    for text in bindings:
        bound |= _read(text, "--gin_bindings", Path(), macros, own)
    bound |= own
    for name, text in (flags or {}).items():
        check_name(name, f"--gin.{name}")
        bound[name] = Binding(flag_value(text, SETTINGS[name].hint, macros), f"--gin.{name}")
        macros.seen_in(f"--gin.{name}")
    _check_macros(bound, macros)
    wheres = {name: binding.where for name, binding in bound.items() if "." in name}
    return _build(_resolve(bound), wheres), wheres


class _Macros(gin.config.ParserDelegate):
    """Gin's parser delegate; it notes which macros are used, and `_read` where."""

    def __init__(self) -> None:
        super().__init__(skip_unknown=False)
        self.used: dict[str, str] = {}

    def macro(self, name: str) -> Any:
        self.used.setdefault(name, "")
        return super().macro(name)

    def seen_in(self, where: str) -> None:
        self.used = {name: earlier or where for name, earlier in self.used.items()}

    def configurable_reference(self, name: str, evaluate: bool) -> Any:
        raise SyntaxError(f"@{name}: no setting takes a reference")


def flag_value(text: str, hint: Any, macros: _Macros) -> Any:
    """A flag's text as a value: true, false, none, a Python literal or a %macro, else the text itself.

    The setting's type decides between them, so that `none` can be None or the choice 'none', and 2024 a folder.
    """
    words = {"true": True, "false": False, "none": None}
    try:
        parser = config_parser.ConfigParser(text, macros)
        literal = parser.parse_value()
        if "\n" in text or parser.current_token.type not in (tokenize.NEWLINE, tokenize.ENDMARKER):
            literal = text
    except (SyntaxError, ValueError, tokenize.TokenError):
        literal = text
    if isinstance(literal, gin.config.ConfigurableReference):
        return literal
    for value in (words.get(text.strip().lower(), literal), literal, text):
        if accepts(hint, value):
            return value
    return literal


def _find_file(name: str, folder: Path, where: str) -> Path:
    """A path from `folder`, or the name of a file in experiments/configs; `.gin` can be left out."""
    paths = [base / (name + suffix) for base in (folder, CONFIGS) for suffix in ("", ".gin")]
    for path in paths:
        if path.is_file():
            return path
    presets = [path.stem for path in CONFIGS.glob("*.gin")]
    beside = [str(Path(name).parent / path.name) for path in paths[0].parent.glob("*.gin")]
    hint = nearest(name, [*beside, *presets])
    raise UserError(f"{where}: no such file{hint if 'did you mean' in hint else nearest(name, presets)}")


def _read_file(path: Path, macros: _Macros, including: tuple[Path, ...] = ()) -> dict[str, Binding]:
    if path.resolve() in including:
        raise UserError(f"{path} includes itself")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from error
    own: dict[str, Binding] = {}
    return _read(text, str(path), path.parent, macros, own, (*including, path.resolve())) | own


def _read(
    text: str, place: str, folder: Path, macros: _Macros, own: dict[str, Binding], including: tuple[Path, ...] = ()
) -> dict[str, Binding]:
    """Adds the bindings of `text` to `own`; returns those of the files it includes, which `own` may override."""
    included: dict[str, Binding] = {}
    for statement in _statements(text, place, macros):
        where = place if place.startswith("--") else f"{place}, line {statement.location.line_num}"
        macros.seen_in(where)
        if isinstance(statement, config_parser.IncludeStatement):
            path = _find_file(statement.filename, folder, f"{where}: include '{statement.filename}'")
            included |= _read_file(path, macros, including)
        elif isinstance(statement, config_parser.ImportStatement):
            raise UserError(f"{where}: {statement.format()}: has no effect; every setting is known without imports")
        elif isinstance(statement, config_parser.BindingStatement):
            name = f"{statement.selector}.{statement.arg_name}".rstrip(".")
            if statement.scope:
                raise UserError(f"{where}: {statement.scope}/{name}: scopes have no effect; write {name}")
            if "." in name:
                check_name(name, where)
            if name in own:
                first, second = own[name], Binding(statement.value, where)
                raise UserError(f"{name} is bound twice: {_quote(first)} and {_quote(second)}")
            own[name] = Binding(statement.value, where)
    return included


def _quote(binding: Binding) -> str:
    return f"{binding.value!r} ({binding.where})"


def _statements(text: str, place: str, macros: _Macros) -> Iterator[Any]:
    try:
        parser = config_parser.ConfigParser(text, macros)
        yield from parser
    except (SyntaxError, tokenize.TokenError) as error:
        if isinstance(error, SyntaxError):
            message, number = str(error.msg), error.lineno or parser.current_token.start[0]
        else:
            message, (number, _) = error.args
        _, _, token = message.partition("Failed to parse token ")
        if token:
            message = f"{token} is no value; text stands in quotes, and there are True, False and None"
        where = place if place.startswith("--") else f"{place}, line {number}"
        line = "".join(text.splitlines()[number - 1 : number]).strip()
        raise UserError(f"{where}: {line}: {message}" if line else f"{where}: {message}") from error


def _check_macros(bound: Mapping[str, Binding], macros: _Macros) -> None:
    defined = {name: binding for name, binding in bound.items() if "." not in name}
    for name, where in macros.used.items():
        if name not in defined:
            raise UserError(f"{where}: %{name} is used but never bound{nearest(name, defined) if defined else ''}")
    for name, binding in defined.items():
        if name not in macros.used:
            same = [known for known in SETTINGS if known.endswith("." + name)]
            hint = f"; did you mean {' or '.join(same)}?" if same else ""
            raise UserError(f"{binding.where}: {name} = {binding.value!r} is never used{hint}")


def _resolve(bound: Mapping[str, Binding]) -> dict[str, dict[str, Any]]:
    """Values of each section, macros replaced; through gin, whose configuration is left empty."""
    gin.clear_config()
    try:
        for name, binding in bound.items():
            key = f"andrea_jax.{name}" if "." in name else (name, "gin.macro", "value")
            gin.bind_parameter(key, binding.value)
        return {section: gin.get_bindings(f"andrea_jax.{section}") for section in MAKERS}
    except RecursionError:
        raise UserError("a macro is defined by itself") from None
    finally:
        gin.clear_config()


def _build(values: Mapping[str, Mapping[str, Any]], wheres: Mapping[str, str]) -> RunConfig:
    try:
        return RunConfig(**{SECTIONS[section][0]: MAKERS[section](**values[section]) for section in SECTIONS})
    except UserError as error:
        where = wheres.get(str(error).split(" ", 1)[0], "--")
        raise UserError(f"{error}" if where.startswith("--") else f"{error} ({where})") from error
