import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import jax, jax.numpy as jnp
from andrea_jax.train.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
f = jax.jit(lambda x: jnp.sort(x @ x, axis=0) @ x)  # temporaries of 4 MB
x = jnp.ones((1000, 1000))
for _ in range(3):
    f(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    f(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_pages_of_temporaries_are_cleared_once_not_each_step():
    faults = {}
    for mode in ("keep", "give back"):
        done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    assert faults["keep"] < 0.5 * faults["give back"]
