"""Over eight virtual CPU devices, inside shard_map and under jit; in processes of their own, as the number is fixed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from andrea_jax.loss import cross_entropy
from pallas_kernels import bias_gelu, dispatch, residual_norm
from pallas_kernels.gates import geglu, swiglu

LAYERS, N, D, V = 2, 32, 24, 40
mesh = jax.make_mesh((8,), ("data",))
x = jax.random.normal(jax.random.key(0), (N, D))
gain, shift, bias = jax.random.normal(jax.random.key(1), (3, D))
head = jax.random.normal(jax.random.key(2), (D, V))
labels, weights = jnp.arange(N) % V, jnp.arange(N) % 3 / 2

def norms(implementation, x, gain, shift, bias):
    for _ in range(LAYERS):  # all share their parameters
        stream, normed = residual_norm(x, x, gain, shift, 1e-5, "layer", implementation)
        x = 0.5 * stream + bias_gelu(normed * normed, bias, implementation)
    return jnp.square(x).sum(-1)

def gates(implementation, x, gain, shift):
    for _ in range(LAYERS):
        x = 0.5 * x + swiglu(gain * x, shift * x, implementation) + geglu(shift * x, gain * x, implementation)
    return jnp.square(x).sum(-1)

def losses(implementation, x, head):
    place = labels[: len(x)], weights[: len(x)]  # each device its own copy of the same
    total, _ = cross_entropy(x[None], head, *(a[None] for a in place), V - 3, 1e-2, 2, implementation)
    return total[None]  # in chunks of two rows

def step(f, implementation, parameters, devices):
    local = lambda *args: f(implementation, *args)
    if devices:
        specs = (P("data"), *[P()] * len(parameters))
        total = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
    else:  # each device's rows by themselves
        total = lambda x, *parameters: jax.vmap(lambda part: local(part, *parameters))(x.reshape(8, -1, D))
    return jax.jit(jax.value_and_grad(lambda *args: total(*args).sum(), argnums=range(1 + len(parameters))))

place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
def auto_on_eight_gpus(x, operation):
    plan = dispatch.plan(operation, x.shape, x.dtype, "auto", platform="gpu", capability="9.0")
    return plan.backward * jnp.ones_like(x)

# Under jit alone a kernel's sharded operand would be gathered, so there auto keeps to XLA.
for operation in ("residual_norm", "cross_entropy"):
    auto = lambda x: auto_on_eight_gpus(x, operation)
    assert jax.jit(auto)(x).max() == 0
    shared = jax.shard_map(auto, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert jax.jit(shared)(place(x, P("data"))).min() == 1

for f, parameters in ((norms, (gain, shift, bias)), (gates, (gain, shift)), (losses, (head,))):
    args = place(x, P("data")), *(place(a, P()) for a in parameters)
    expected = step(f, "xla", parameters, False)(x, *parameters)
    for implementation in ("xla", "pallas"):
        compiled = step(f, implementation, parameters, True).lower(*args).compile()
        # Gradients here reach 10^3; two orders of summation and two layers lie between.
        for a, b in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
        kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
        ((shapes, kind),) = re.findall(rf"= (.*?) ({kinds})", compiled.as_text())
        assert kind == "all-reduce"
        # The total, and each parameter's gradient once.
        sizes = [np.prod([int(n) for n in shape.split(",") if n]) for shape in re.findall(r"\\[([\\d,]*)\\]", shapes)]
        assert sorted(sizes) == sorted([1, *(a.size for a in parameters)]), (f, shapes)
"""

UNDER_JIT = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from pallas_kernels import bias_gelu, residual_norm

B, T, D = 8, 3, 24
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
place = lambda *axes: NamedSharding(mesh, P(*axes))
x = jax.random.normal(jax.random.key(0), (B, T, D))
gain, shift, bias = jax.random.normal(jax.random.key(1), (3, D))

def norms(implementation, sharding, x, gain, shift):
    for _ in range(2):
        stream, normed = residual_norm(x, x, gain, shift, 1e-5, "layer", implementation, sharding)
        x = 0.5 * stream + normed
    return jnp.square(x).sum()

def gelus(implementation, sharding, x, bias):
    for _ in range(2):
        x = 0.5 * x + bias_gelu(x * x, bias, implementation, sharding)
    return jnp.square(x).sum()

rows, both = place("data", None, None), place("data", None, "tensor")
# One all-reduce over `data` of the total and of each call's sums for its parameters, as wide as on a device; where the
# width is split, one more of the total over `tensor`.
for f, sharding, parameters, added in (
    (norms, rows, (gain, shift), [[1, D, D, D, D]]),
    (gelus, rows, (bias,), [[1, D, D]]),
    (gelus, both, (bias,), [[1], [1, D // 2, D // 2]]),
):
    vector = place(sharding.spec[-1])
    args = jax.device_put(x, sharding), *(jax.device_put(a, vector) for a in parameters)
    step = lambda implementation, sharding: jax.jit(
        jax.value_and_grad(lambda *args: f(implementation, sharding, *args), argnums=range(len(args)))
    )
    expected = step("xla", None)(x, *parameters)
    compiled = step("pallas", sharding).lower(*args).compile()
    for a, b in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    gradient = compiled(*args)[1][0]
    assert gradient.sharding.is_equivalent_to(sharding, 3), gradient.sharding
    text = compiled.as_text()
    assert not re.findall(r"(?:all-gather|all-to-all|collective-permute|reduce-scatter)\\(", text)
    size = lambda shape: int(np.prod([int(n) for n in shape.split(",") if n]))
    sizes = lambda shapes: sorted(map(size, re.findall(r"\\[([\\d,]*)\\]", shapes)))
    reduced = sorted(map(sizes, re.findall(r"= (.*?) all-reduce\\(", text)))
    assert reduced == added, reduced
"""


@pytest.mark.parametrize("program", [PROGRAM, UNDER_JIT], ids=["in shard_map", "under jit"])
def test_rows_stay_on_their_devices_and_parameter_gradients_are_reduced_once(program):
    root = Path(__file__).parents[2]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
