"""Compiling for a GPU that is described, not present: XLA's CUDA plug-in and a description of the card are enough."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from andrea_jax.settings import UserError, nearest

TARGETS = Path(__file__).parent / "gpu_targets"


def cards() -> list[str]:
    """The cards that are described."""
    return sorted(file.stem for file in TARGETS.glob("*.txtpb"))


def compile_for(card: str, f: Callable[..., Any], *args: Any, **jit_options: Any) -> Any:
    """f compiled for one `card`; `args` are trees of anything with shape and dtype.

    Fusion, memory and collectives come out as on the real card; matrix products are not autotuned.

    Raises:
        UserError: no such card, or no CUDA plug-in.
    """
    if card not in cards():
        raise UserError(f"no description of the card {card!r}{nearest(card, cards())}")
    try:
        description = (TARGETS / f"{card}.txtpb").read_text()
        topology = topologies.get_topology_desc("", "cuda", topology="1x1x1", target_config=description)
    except NotImplementedError as error:
        packages = "jax-cuda12-plugin, jax-cuda12-pjrt, nvidia-cuda-nvcc-cu12 and nvidia-cudnn-cu12"
        raise UserError(f"compiling for {card} needs {packages}; no GPU") from error
    sharding = SingleDeviceSharding(topology.devices[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(f, **jit_options).lower(*abstract).compile()
