"""Inside shard_map over eight virtual CPU devices, in a process of its own because the number is fixed at start."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from pallas_kernels import bias_gelu, dispatch, residual_norm

LAYERS, N, D = 2, 32, 24
mesh = jax.make_mesh((8,), ("data",))
x = jax.random.normal(jax.random.key(0), (N, D))
gain, shift, bias = jax.random.normal(jax.random.key(1), (3, D))

def layers(x, gain, shift, bias, implementation):
    for _ in range(LAYERS):  # all share their parameters
        stream, normed = residual_norm(x, x, gain, shift, 1e-5, "layer", implementation)
        x = 0.5 * stream + bias_gelu(normed * normed, bias, implementation)
    return x

def loss(implementation, sharded):
    f = lambda *args: layers(*args, implementation)
    if sharded:
        f = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P(), P(), P()), out_specs=P("data"), check_vma=False)
    return jax.jit(jax.value_and_grad(lambda *args: jnp.square(f(*args)).sum(), argnums=(0, 1, 2, 3)))

place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
def auto_on_eight_gpus(x):
    plan = dispatch.plan("residual_norm", x.shape, x.dtype, "auto", platform="gpu", capability="9.0")
    return plan.backward * jnp.ones_like(x)

# Under jit alone a kernel's sharded operand would be gathered, so there auto keeps to XLA.
assert jax.jit(auto_on_eight_gpus)(x).max() == 0
assert jax.jit(jax.shard_map(auto_on_eight_gpus, mesh=mesh, in_specs=P("data"), out_specs=P("data")))(
    place(x, P("data"))
).min() == 1

args = place(x, P("data")), place(gain, P()), place(shift, P()), place(bias, P())
expected = loss("xla", False)(x, gain, shift, bias)
for implementation in ("xla", "pallas"):
    step = loss(implementation, True)
    compiled = step.lower(*args).compile()
    # Gradients here reach 10^3; two orders of summation and two layers of norms lie between.
    for a, b in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    ((shapes, kind),) = re.findall(rf"= (.*?) ({kinds})", compiled.as_text())
    assert kind == "all-reduce"
    # The loss, and once each the gain, the shift and the bias.
    assert sorted(re.findall(r"\\[[\\d,]*\\]", shapes)) == ["[24]", "[24]", "[24]", "[]"]
"""


def test_rows_stay_on_their_devices_and_parameter_gradients_are_reduced_once():
    root = Path(__file__).parents[2]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
