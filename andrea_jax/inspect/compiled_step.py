"""A training step compiled for GPUs that are not here; its bytes and FLOPs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from andrea_jax.inspect.collectives import Collective, collectives_of
from andrea_jax.inspect.compile_for import described_gpus, kernels_as_on
from andrea_jax.inspect.product_flops import product_flops
from andrea_jax.layers.attention import check_attention, choose_back_end
from andrea_jax.settings import UserError
from andrea_jax.sharding import ROWS, MeshConfig, bytes_on_device, check_divides, make_mesh, mesh_shape, named
from andrea_jax.train.config import RunConfig
from andrea_jax.train.parallel import lower_step, sharded_abstract_state


@dataclasses.dataclass(frozen=True)
class Cluster:
    """`gpus` of one card in each of `hosts`."""

    card: str
    hosts: int
    gpus: int

    @property
    def devices(self) -> int:
        return self.hosts * self.gpus


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """One device's share of a compiled step: bytes that it holds and sends, and FLOPs of its matrix products."""

    parameters: int
    optimizer: int
    batch: int
    temporaries: int
    other: int
    flops: int
    collectives: list[Collective]
    text: str = dataclasses.field(repr=False)

    @property
    def memory(self) -> int:
        return self.parameters + self.optimizer + self.batch + self.temporaries + self.other

    @property
    def sent(self) -> float:
        return sum(collective.sent for collective in self.collectives)


def compiled_step(config: RunConfig, cluster: Cluster) -> CompiledStep:
    """The step of a run that trains on the cluster, as `experiments/train.py` would compile it there.

    Raises:
        UserError: a mesh that does not fit the GPUs, the model or the batch; no such card; no CUDA plug-in.
    """
    mesh = make_mesh(config.mesh, described_gpus(cluster.card, cluster.hosts, cluster.gpus))
    check_divides(mesh, config.model, config.train.batch_size, config.train.accumulate)
    state, batch = sharded_abstract_state(config, mesh), _abstract_batch(config, mesh)
    with kernels_as_on(cluster.card):
        compiled = _compile(lower_step(config, mesh, state, batch))
    kept = _bytes((state.optimizer, state.average))
    held = {"parameters": _bytes(state.params), "optimizer": kept, "batch": _bytes(batch)}
    memory, text = compiled.memory_analysis(), compiled.as_text()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return CompiledStep(
        **held,
        temporaries=memory.temp_size_in_bytes,
        other=memory.argument_size_in_bytes - sum(held.values()) + new,
        flops=product_flops(text),
        collectives=collectives_of(text, mesh.shape, cluster.gpus),
        text=text,
    )


def _compile(lowered: Any) -> Any:
    """Compiled; with cuBLAS for all products where XLA, which can time none here, finds no tiles for one of its own."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "tile sizes" not in str(error):
            raise
        return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False})


def _abstract_batch(config: RunConfig, mesh: Any) -> dict[str, jax.ShapeDtypeStruct]:
    shape, sharding = (config.train.batch_size, config.model.context_length), named(mesh, "batch", None)
    dtypes = {"tokens_BT": jnp.int32, "targets_BT": jnp.int32, "weights_BT": jnp.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}


def _bytes(tree: Any) -> int:
    """Bytes of one device's part of the arrays."""
    return sum(bytes_on_device(x) for x in jax.tree.leaves(tree))


def on_gpus(config: RunConfig) -> RunConfig:
    """The run with `auto` resolved as on a GPU.

    Raises:
        UserError: a back end of attention that cannot run there.
    """
    engine, model = config.engine, config.model
    dtype = engine.dtype_on("gpu")
    check_attention(engine, model, dtype, "gpu")
    attention = choose_back_end(engine, model, dtype, model.context_length, "gpu")
    resolved: dict[str, Any] = {"dtype": dtype.name, "attention": attention}
    return dataclasses.replace(config, engine=dataclasses.replace(engine, **resolved))


def on_one_host(config: RunConfig, cluster: Cluster) -> tuple[RunConfig, Cluster]:
    """The same run on one of the hosts: as many windows a GPU, `data` smaller first, then `fsdp`, then `expert`.

    Raises:
        UserError: a mesh whose `tensor` axis crosses hosts.
    """
    mesh, rest = mesh_shape(config.mesh, cluster.devices), cluster.hosts
    for axis in ROWS:
        fewer = math.gcd(mesh[axis], rest)
        mesh[axis], rest = mesh[axis] // fewer, rest // fewer
    if rest > 1:
        crosses = f"mesh.tensor = {mesh['tensor']} crosses hosts of {cluster.gpus} GPUs"
        raise UserError(f"{crosses}: no such run fits on one host")
    train = dataclasses.replace(config.train, batch_size=config.train.batch_size // cluster.hosts)
    one = dataclasses.replace(config, train=train, mesh=MeshConfig(**mesh))
    return one, dataclasses.replace(cluster, hosts=1)
