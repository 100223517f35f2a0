"""Rotary positions in a config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` from transformers 5 on."""

from __future__ import annotations

import math
from typing import Any

from andrea_jax.config import ModelConfig
from andrea_jax.interop.hugging_face.options import REQUIRED, Options
from andrea_jax.layers.position import yarn_length

WINDOWED, GLOBAL = "sliding_attention", "full_attention"
NAMES = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
DEFAULTS = {"llama3": (REQUIRED, REQUIRED), "yarn": (1, 32)}


def read_rotary(options: Options, base: float, local_base: float | None = None) -> dict[str, Any]:
    """Our fields. `base` and `local_base` are the architecture's where the file gives none."""
    place = "rope_scaling" if options.get("rope_scaling", None) else "rope_parameters"
    found = options.get(place, None) or {}
    options.only("partial_rotary_factor", 1)
    nested = isinstance(found, dict) and (WINDOWED in found or GLOBAL in found)
    whole = options.part(place, found.get(GLOBAL) or {} if nested else found)
    fields = _scaling(whole, options)
    fields["rotary_base"] = whole.get("rope_theta", options.number("rope_theta", base))
    if local_base is not None:
        windowed = options.part(f"{place}.{WINDOWED}", found.get(WINDOWED) or {} if nested else {})
        for name in ("rope_type", "type"):
            windowed.only(name, "default")
        local = options.number("rope_local_base_freq", local_base)
        fields["rotary_local_base"] = windowed.get("rope_theta", local)
    return fields


def _scaling(rope: Options, options: Options) -> dict[str, Any]:
    """What stretches the wavelengths."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise rope.wrong("rope_type", kind, "there are default, linear, llama3, yarn")
    rope.only("partial_rotary_factor", 1)
    if kind == "default":
        return {}
    context = options.number("max_position_embeddings")
    fields: dict[str, Any] = {"rotary_scaling": kind}
    if kind == "linear":
        return fields | {"rotary_factor": rope.number("factor")}
    outside = options.get("original_max_position_embeddings", None) is not None
    original = (options if outside else rope).number("original_max_position_embeddings", context)
    if kind == "yarn" and rope.get("factor", None) is None:
        fields["rotary_factor"] = context / original
    else:
        fields["rotary_factor"] = rope.number("factor")
    slow, fast = (rope.number(name, default) for name, default in zip(NAMES[kind], DEFAULTS[kind], strict=True))
    fields |= {"rotary_original": original, "rotary_slow": slow, "rotary_fast": fast}
    if kind == "yarn":
        rope.only("truncate", True)
        fields["rotary_length"] = _length(rope, fields["rotary_factor"])
    return fields


def _length(rope: Options, factor: float) -> float:
    """yarn: times the rotated vectors; `mscale` and `mscale_all_dim` each stand for a length of its own."""
    given, one, other = (rope.get(name, None) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return rope.number("attention_factor")
    if not (one and other):
        return yarn_length(factor)
    lengths = [0.1 * rope.number(name) * math.log(factor) + 1.0 for name in ("mscale", "mscale_all_dim")]
    return lengths[0] / lengths[1]


def write_rotary(config: ModelConfig, local: bool = False) -> dict[str, Any]:
    """Their options, in the form that every version of transformers reads."""
    kind = config.rotary_scaling
    options: dict[str, Any] = {"rope_theta": config.rotary_base, "rope_scaling": None}
    if local:
        options["rope_local_base_freq"] = config.rotary_local_base or config.rotary_base
    if kind == "none":
        return options
    scaling: dict[str, Any] = {"rope_type": kind, "factor": config.rotary_factor}
    if kind in NAMES:
        slow, fast = NAMES[kind]
        scaling |= {slow: config.rotary_slow, fast: config.rotary_fast}
        scaling["original_max_position_embeddings"] = config.rotary_original
    if kind == "yarn":
        scaling["attention_factor"] = config.rotary_length
    return options | {"rope_scaling": scaling}
