"""Compiling for GPUs that are described, not present: XLA's CUDA plug-in and a description of the card are enough."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from andrea_jax.settings import UserError, nearest
from pallas_kernels import dispatch

TARGETS = Path(__file__).parent / "gpu_targets"


def cards() -> list[str]:
    """The cards that are described."""
    return sorted(file.stem for file in TARGETS.glob("*.txtpb"))


def description(card: str) -> str:
    """What XLA is told of a card.

    Raises:
        UserError: no such card.
    """
    if card not in cards():
        raise UserError(f"no description of the card {card!r}{nearest(card, cards())}")
    return (TARGETS / f"{card}.txtpb").read_text()


def memory_bytes(card: str) -> int:
    """The memory of a card."""
    return int(_field(card, r"device_memory_size: (\d+)"))


def device_kind(card: str) -> str:
    """What JAX calls a card."""
    return _field(card, r'device_description_str: "([^"]*)"')


def described_gpus(card: str, hosts: int = 1, gpus: int = 1) -> list[Any]:
    """Devices to compile for: `gpus` of one `card` in each of `hosts`, host by host.

    Raises:
        UserError: no such card, or no CUDA plug-in.
    """
    text = description(card)
    try:
        return topologies.get_topology_desc("", "cuda", topology=f"1x{hosts}x{gpus}", target_config=text).devices
    except NotImplementedError as error:
        packages = "jax-cuda12-plugin, jax-cuda12-pjrt, nvidia-cuda-nvcc-cu12 and nvidia-cudnn-cu12"
        raise UserError(f"compiling for {card} needs {packages}; no GPU") from error


def compile_for(card: str, f: Callable[..., Any], *args: Any, **jit_options: Any) -> Any:
    """f compiled for one `card`; `args` are trees of anything with shape and dtype.

    Fusion, memory and collectives come out as on the real card; matrix products are not autotuned.

    Raises:
        UserError: no such card, or no CUDA plug-in.
    """
    sharding = SingleDeviceSharding(described_gpus(card)[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(f, **jit_options).lower(*abstract).compile()


@contextlib.contextmanager
def kernels_as_on(card: str) -> Iterator[None]:
    """Within it `engine.kernels = 'auto'` chooses as on the card."""
    capability = _field(card, r"cuda_compute_capability \{ major: (\d+)") + "." + _field(card, r"minor: (\d+)")
    there = functools.partial(dispatch.support, platform="gpu", capability=capability)
    with mock.patch.object(dispatch, "support", there):
        yield


def _field(card: str, pattern: str) -> str:
    found = re.search(pattern, description(card))
    assert found is not None, f"{card}.txtpb has no {pattern}"
    return found.group(1)
