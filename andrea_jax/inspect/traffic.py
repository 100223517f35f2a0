"""What a training step has to send between devices, by formula, to hold what is compiled against."""

from __future__ import annotations

import collections
import math

from andrea_jax.layers.routing import capacity
from andrea_jax.parameters import Spec, count_parameters, named_specs
from andrea_jax.sharding import ROWS, mesh_shape, plan_mesh, rows_over, spec_sharding
from andrea_jax.train.config import RunConfig

Traffic = dict[tuple[tuple[str, ...], str], float]  # (axes of the mesh, kind of collective) -> bytes


def traffic(config: RunConfig, devices: int) -> Traffic:
    """Bytes that each device sends in a step of a run on so many devices, in rings.

    data, and expert but for experts: all-reduce of each gradient, 2 (n-1)/n of its bytes. fsdp: all-gather of each
    weight where it is used, forward and backward for those of blocks, and reduce-scatter of its gradient, (n-1)/n each;
    the copies then reduce 1/fsdp of it. tensor: all-reduces of [B, T, D] activations, 4 a block (5 where blocks are
    recomputed), of the looked-up embeddings and of the gradient of the last ones. expert: with a capacity all-to-all of
    the experts' places, full or not, 4 a block (6), else all-gather and reduce-scatter of [B, T, D], 2 each (3 and 2).
    Weights of blocks, their gradients and the head move in the activations' dtype, all else and routers in float32;
    once for each part of an accumulated batch. pmap: all-reduce of the whole gradient in float32, once.
    """
    if config.train.parallel == "pmap":
        return {(("data",), "all-reduce"): _ring(devices, 2 * 4 * count_parameters(config.model))}
    sizes = mesh_shape(config.mesh, devices)
    sent: Traffic = collections.defaultdict(float)
    activation = config.engine.activation_dtype.itemsize
    for name, spec in named_specs(config.model).items():
        if "choice" not in spec.axes and (spec.matrix is not None or "expert" in spec.axes):
            gradient, uses = activation, 2 * activation
        elif name == "token_embedding" and config.model.tie_embeddings:
            gradient, uses = 4, 4 + activation
        else:
            gradient, uses = 4, activation if name == "head" else 4 * (1 + ("choice" in spec.axes))
        _add_weight(sent, config, sizes, spec, gradient, uses)
    _add_activations(sent, sizes, config, activation)
    if config.model.n_expert:
        _add_tokens(sent, sizes, config, activation)
    return {key: amount for key, amount in sent.items() if amount}


def _add_weight(
    sent: Traffic, config: RunConfig, sizes: dict[str, int], spec: Spec, gradient: float, uses: float
) -> None:
    """`gradient` and `uses`: bytes of a number's gradient, and of all that is gathered of it, in a step."""
    split = set(spec_sharding(plan_mesh(config.mesh, math.prod(sizes.values())), spec.axes).spec)
    parts = math.prod(sizes[axis] for axis in split & {"expert", "tensor"})
    size = config.train.accumulate * math.prod(spec.shape) / parts
    whole = [axis for axis in ROWS if axis not in split]
    if "fsdp" in split:
        sent[("fsdp",), "all-gather"] += _ring(sizes["fsdp"], uses * size)
        sent[("fsdp",), "reduce-scatter"] += _ring(sizes["fsdp"], gradient * size)
        size /= sizes["fsdp"]
    if "choice" in spec.axes or ("expert" in spec.axes and "tensor" not in split):
        whole.append("tensor")  # each of its devices has a part of their gradients
    over = tuple(axis for axis in whole if sizes[axis] > 1)
    sent[over, "all-reduce"] += _ring(math.prod(sizes[axis] for axis in over), 2 * gradient * size)


def _add_activations(sent: Traffic, sizes: dict[str, int], config: RunConfig, itemsize: int) -> None:
    model = config.model
    blocks = model.n_layer * (5 if config.engine.remat == "block" else 4) * itemsize
    amount = _tokens(config, sizes) * model.d_model * (blocks + 4 + itemsize)
    sent[("tensor",), "all-reduce"] += _ring(sizes["tensor"], 2 * amount)


def _add_tokens(sent: Traffic, sizes: dict[str, int], config: RunConfig, itemsize: int) -> None:
    """What goes to experts and comes back; without a capacity the choices too, 4 bytes each and 4 for its weight."""
    model, again = config.model, config.engine.remat == "block"
    tokens, token = model.n_layer * _tokens(config, sizes), model.d_model * itemsize
    room = capacity(model, model.context_length)
    if room is not None:
        places = tokens / model.context_length * (model.n_expert or 0) * room
        sent[("expert",), "all-to-all"] += _ring(sizes["expert"], places * token * (6 if again else 4))
        return
    tokens, choice = tokens * sizes["expert"], 4 * model.expert_top_k
    gathered = (2 + again) * token + (1 + again) * 2 * choice
    sent[("expert",), "all-gather"] += _ring(sizes["expert"], tokens * gathered)
    sent[("expert",), "reduce-scatter"] += _ring(sizes["expert"], tokens * (2 * token + choice))


def _tokens(config: RunConfig, sizes: dict[str, int]) -> float:
    """Of a batch, on each device."""
    return config.train.batch_size * config.model.context_length / rows_over(sizes)


def _ring(devices: int, amount: float) -> float:
    return amount * (devices - 1) / devices
