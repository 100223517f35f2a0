"""What a training step has to send between devices, by formula, to hold what is compiled against."""

from __future__ import annotations

import collections
import math

from andrea_jax.parameters import Spec, count_parameters, named_specs
from andrea_jax.sharding import AXES, RULES, mesh_shape
from andrea_jax.train.config import RunConfig

Traffic = dict[tuple[tuple[str, ...], str], float]  # (axes of the mesh, kind of collective) -> bytes


def traffic(config: RunConfig, devices: int) -> Traffic:
    """Bytes that each device sends in a step of a run on so many devices, in rings.

    data: all-reduce of each gradient, 2 (n-1)/n of its bytes. fsdp: all-gather of each weight where it is used,
    forward and backward for those of blocks, and reduce-scatter of its gradient, (n-1)/n each; data then reduces 1/fsdp
    of it. tensor: all-reduces of [B, T, D] activations, 4 a block (5 where blocks are recomputed), of the looked-up
    embeddings and of the gradient of the last ones. Weights of blocks, their gradients and the head move in the
    activations' dtype, all else in float32; once for each part of an accumulated batch. pmap: all-reduce of the whole
    gradient in float32, once.
    """
    sizes = dict(zip(AXES, mesh_shape(config.mesh, devices), strict=True))
    if config.train.parallel == "pmap":
        return {(("data",), "all-reduce"): _ring(devices, 2 * 4 * count_parameters(config.model))}
    sent: Traffic = collections.defaultdict(float)
    parts, activation = config.train.accumulate, config.engine.activation_dtype.itemsize
    for name, spec in named_specs(config.model).items():
        size = parts * math.prod(spec.shape) // (sizes["tensor"] if "tensor" in map(RULES.get, spec.axes) else 1)
        if spec.matrix is not None:
            gradient, uses = activation, 2 * activation
        elif name == "token_embedding" and config.model.tie_embeddings:
            gradient, uses = 4, 4 + activation
        else:
            gradient, uses = 4, activation if name == "head" else 4
        _add_weight(sent, sizes, spec, size * gradient, size * uses)
    _add_activations(sent, sizes, config, activation)
    return {key: amount for key, amount in sent.items() if amount}


def _add_weight(sent: Traffic, sizes: dict[str, int], spec: Spec, gradient: float, uses: float) -> None:
    """`gradient` and `uses`: bytes of the gradient, and of all that is gathered of the weight, in a step."""
    data, fsdp = sizes["data"], sizes["fsdp"]
    if sum(axis != "layer" for axis in spec.axes) == 1:  # a vector: each device has it whole
        both = tuple(axis for axis in ("data", "fsdp") if sizes[axis] > 1)
        sent[both, "all-reduce"] += _ring(data * fsdp, 2 * gradient)
        return
    sent[("fsdp",), "all-gather"] += _ring(fsdp, uses)
    sent[("fsdp",), "reduce-scatter"] += _ring(fsdp, gradient)
    sent[("data",), "all-reduce"] += _ring(data, 2 * gradient / fsdp)


def _add_activations(sent: Traffic, sizes: dict[str, int], config: RunConfig, itemsize: int) -> None:
    model = config.model
    tokens = config.train.batch_size * model.context_length / (sizes["data"] * sizes["fsdp"])
    blocks = model.n_layer * (5 if config.engine.remat == "block" else 4) * itemsize
    amount = tokens * model.d_model * (blocks + 4 + itemsize)
    sent[("tensor",), "all-reduce"] += _ring(sizes["tensor"], 2 * amount)


def _ring(devices: int, amount: float) -> float:
    return amount * (devices - 1) / devices
