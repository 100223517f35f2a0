"""A kernel on each device's rows: jit alone would gather what a kernel reads and repeat its work everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def over_rows(f: Callable[..., Any], sharding: NamedSharding | None, inputs: str, outputs: str) -> Callable[..., Any]:
    """f inside shard_map, for arrays [..., width] that lie as `sharding` says; f itself without one.

    A letter for each argument and result says what it is: x, an array like the sharded one; v, a vector [width];
    s, the sum over all rows for the v of the same rank in order. Each device gives its part of a sum in float32; they
    are added outside, so that XLA reduces those of many calls together. Arguments and results may be None.
    """
    if sharding is None or sharding.mesh.size == 1:
        return f
    *rows, width = sharding.spec
    over = tuple(jax.tree.leaves(rows))  # the mesh's axes, without the nesting
    specs = {"x": sharding.spec, "v": PartitionSpec(width), "s": PartitionSpec(over, width)}

    def local(*args: Any) -> Any:
        wide = (a.astype(jnp.float32) if c == "v" and a is not None else a for c, a in zip(inputs, args, strict=True))
        results = f(*wide)
        results = results if isinstance(results, tuple) else (results,)
        parts = (r[None] if c == "s" and r is not None else r for c, r in zip(outputs, results, strict=True))
        return tuple(parts)

    def sharded(*args: Any) -> Any:
        in_specs, out_specs = (tuple(specs[c] for c in codes) for codes in (inputs, outputs))
        results = jax.shard_map(local, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
            *args
        )
        vectors = iter([a for c, a in zip(inputs, args, strict=True) if c == "v"])
        added = []
        for code, result in zip(outputs, results, strict=True):
            if code == "s":
                like = next(vectors)
                result = None if result is None else result.sum(0).astype(like.dtype)
            added.append(result)
        return tuple(added) if len(added) > 1 else added[0]

    return sharded
