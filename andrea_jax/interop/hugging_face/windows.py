"""Which blocks have a window: a list of layer types there, `window` and `global_every` here."""

from __future__ import annotations

from typing import Any

from andrea_jax.config import ModelConfig
from andrea_jax.interop.hugging_face.options import Options
from andrea_jax.interop.hugging_face.rotary import GLOBAL, WINDOWED


def read_windows(options: Options, window: int | None, types: list[str]) -> dict[str, Any]:
    """Our fields. `types` are those of the architecture where the file gives none.

    Raises:
        UserError: a pattern other than all, none, or all but every n-th.
    """
    n_layer = len(types)
    found = options.get("layer_types", None) or types
    if not isinstance(found, list) or len(found) != n_layer or any(kind not in (WINDOWED, GLOBAL) for kind in found):
        raise options.wrong("layer_types", found, f"{n_layer} of {WINDOWED} and {GLOBAL}")
    if WINDOWED not in found or window is None:
        return {}
    every = found.index(GLOBAL) + 1 if GLOBAL in found else None
    fields = {"window": window, "global_every": every}
    if [kind == GLOBAL for kind in found] != [every is not None and (i + 1) % every == 0 for i in range(n_layer)]:
        here = ", ".join(str(i) for i, kind in enumerate(found) if kind == GLOBAL)
        raise options.wrong("layer_types", "[...]", f"blocks {here} see all; it can be none, or every n-th")
    return fields


def layer_types(config: ModelConfig) -> list[str]:
    """The type of each block."""
    return [GLOBAL if config.sees_all(layer) else WINDOWED for layer in range(config.n_layer)]


def every_nth_global(n_layer: int, n: int) -> list[str]:
    return [WINDOWED if (layer + 1) % n else GLOBAL for layer in range(n_layer)]
