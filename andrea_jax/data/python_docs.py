"""The default corpus: the English documentation inside Python itself. Nothing is downloaded."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from andrea_jax.settings import UserError

SKIPPED_FOLDERS = {
    *("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "encodings"),
    *("site-packages", "dist-packages", "lib-dynload", "pydoc_data", "__pycache__"),
}
Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def python_docs() -> tuple[bytes, ...]:
    """One document for each language topic, then one for each standard module that has docstrings.

    A module's document lists `qualified name, docstring` in source order; a docstring seen before is left out.

    Raises:
        UserError: this Python came without its topics or its sources.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise _missing("pydoc_data.topics") from None
    seen: set[str] = set()
    documents = [text.strip() + "\n" for _, text in sorted(topics.items())]
    documents += ["\n".join(_entries(path, name, seen)) for name, path in source_files()]
    return tuple(text.encode() for text in dict.fromkeys(documents) if text)


def source_files() -> list[tuple[str, Path]]:
    """(module name, .py file) of the standard library, sorted by name.

    Raises:
        UserError: there are no .py files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and name.isidentifier()]
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            parts = path.relative_to(root).with_suffix("").parts
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    if not found:
        raise _missing(f"{root}/*.py")
    return sorted(found)


def _entries(path: Path, module: str, seen: set[str]) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates that are not Python
            return
    for name, docstring in _docstrings(tree, module):
        text = inspect.cleandoc(docstring).strip()
        if text and text not in seen:
            seen.add(text)
            yield f"{name}\n\n{text}\n"


def _docstrings(node: Definition, name: str) -> Iterator[tuple[str, str]]:
    if docstring := ast.get_docstring(node, clean=False):
        yield name, docstring
    for child in node.body:
        if isinstance(child, Definition):
            yield from _docstrings(child, f"{name}.{child.name}")


def _missing(what: str) -> UserError:
    return UserError(
        f"data.path = 'python_docs': this Python came without {what};\n"
        "give data.path a text file or folder, or use a Python that has its standard library as .py files"
    )
