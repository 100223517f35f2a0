"""Where the time of a mixture of experts goes: routing, dispatch, experts and combine apart, beside a dense MLP.

    python experiments/bench/moe.py --json moe.json

Forward, float32 on CPU and bfloat16 on GPU. `even`: every expert has the same load; `skewed`: one has about half.
`ragged_dot` is jax.lax.ragged_dot on the same rows, for one product; `dense` is an MLP of top_k times the width, which
does the same arithmetic. The parts need not add up to the whole, in which XLA fuses them.
"""

from __future__ import annotations

import argparse
import json
import platform
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table
from timing import sample

from andrea_jax.config import ModelConfig
from andrea_jax.layers.expert_product import at_once, expert_product, one_by_one
from andrea_jax.layers.expert_rows import place_rows
from andrea_jax.layers.mlp import mlp
from andrea_jax.layers.moe import combine, dispatch, experts, moe
from andrea_jax.layers.routing import route
from andrea_jax.parameters import abstract_params

LOADS = ("even", "skewed")


def timings(config: ModelConfig, rows: int, load: str, samples: int, dtype: Any) -> dict[str, dict[str, Any]]:
    """{part: percentiles in microseconds}."""
    rng, E, K = np.random.default_rng(0), config.n_expert or 1, config.expert_top_k
    shapes = jax.tree.map(lambda x: x.shape[1:], abstract_params(config)["blocks"]["moe"])
    draw = partial(
        jax.tree.map, lambda s: jnp.float32(0.05 * rng.standard_normal(s)), is_leaf=lambda s: type(s) is tuple
    )
    p = draw(shapes)
    p = {name: w if name == "router" else w.astype(dtype) for name, w in p.items()}
    x = jnp.asarray(rng.standard_normal((rows, config.context_length, config.d_model)), dtype)
    if load == "skewed":  # a direction that all tokens share, and that the first expert reads
        x, p["router"] = x.at[..., 0].set(1.0), p["router"].at[0, 0].set(10.0)
    wide = ModelConfig(d_model=config.d_model, n_head=1, mlp_size=K * config.expert_dim, activation=config.activation,
                       gated=config.gated, mlp_bias=False)  # fmt: skip
    dense = draw(jax.tree.map(lambda w: w.shape[1:], abstract_params(wide)["blocks"]["mlp"]))

    choice, _ = jax.jit(partial(route, config=config))(p, x)
    place = jax.jit(lambda e: place_rows(e, E, None)._replace(blocks=0))
    blocks = place_rows(choice.experts_BTK, E, None).blocks
    arrays = place(choice.experts_BTK)._replace(blocks=None, even=None)
    x_ZRD = jax.jit(lambda x, r: dispatch(x, r._replace(blocks=blocks), K))(x, arrays)
    y_ZRD = jax.jit(lambda p, x, r: experts(p, x, r, config, "auto"))(p, x_ZRD, arrays)
    counts = jnp.bincount(jnp.ravel(choice.experts_BTK), length=E).astype(jnp.int32)
    sorted_RD = jnp.repeat(x.reshape(-1, x.shape[-1]), K, axis=0)
    calls = {
        "routing": (lambda p, x: route(p, x, config), p, x),
        "placing rows": (lambda e: place_rows(e, E, None)[:3], choice.experts_BTK),
        "dispatch": (lambda x, r: dispatch(x, r._replace(blocks=blocks), K), x, arrays),
        "experts": (lambda p, x, r: experts(p, x, r, config, "auto"), p, x_ZRD, arrays),
        "combine": (lambda y, r, w: combine(y, r, w), y_ZRD, arrays, choice.weights_BTK),
        "all": (lambda p, x: moe(p, x, config)[0], p, x),
        "all, backward too": (jax.grad(lambda p, x: moe(p, x, config)[0].astype(jnp.float32).sum(), (0, 1)), p, x),
        "dense": (lambda p, x: mlp(p, x, wide), dense, x),
        "one product": (lambda x, w, e: expert_product(x, w, e), x_ZRD, p["w_1"], arrays.expert_Z),
        "one product, blocks one by one": (
            lambda x, w, e: one_by_one(len(e), x, w, e),
            x_ZRD,
            p["w_1"],
            arrays.expert_Z,
        ),
        "one product, blocks at once": (lambda x, w, e: at_once(len(e), x, w, e), x_ZRD, p["w_1"], arrays.expert_Z),
        "one product, ragged_dot": (jax.lax.ragged_dot, sorted_RD, p["w_1"], counts),
    }
    found = {}
    for name, (f, *args) in calls.items():
        compiled = jax.jit(f)
        found[name] = sample(lambda n, c=compiled, a=args: c(*a), jax.block_until_ready, samples)
    found["load"] = {"busiest": float(counts.max() / counts.sum()), "even": 1 / E}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = dict(rows=4, context=256, width=128, experts=8, top_k=2, expert_size=256, samples=20)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    config = ModelConfig(
        context_length=args.context, d_model=args.width, n_head=1, n_layer=1, n_expert=args.experts,
        expert_top_k=args.top_k, expert_size=args.expert_size, activation="silu", gated=True, mlp_bias=False,
    )  # fmt: skip
    device = jax.devices()[0]
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    results = {load: timings(config, args.rows, load, args.samples, dtype) for load in LOADS}
    conditions = {"device": device.device_kind, "machine": platform.machine(), "jax": jax.__version__,
                  "dtype": jnp.dtype(dtype).name, **{n: getattr(args, n) for n in sizes}}  # fmt: skip
    table = Table(title=" ".join(f"{k}={v}" for k, v in conditions.items()), title_justify="left")
    for heading in ("us: p50 (p95)", *(f"{load}: busiest {results[load]['load']['busiest']:.0%}" for load in LOADS)):
        table.add_column(heading)
    for name in results["even"]:
        if name != "load":
            table.add_row(
                name, *(f"{results[load][name]['p50']:.0f} ({results[load][name]['p95']:.0f})" for load in LOADS)
            )
    Console(width=140).print(table)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"conditions": conditions, "microseconds": results}, file, indent=1)


if __name__ == "__main__":
    main()
