"""Variants of the block over eight virtual CPU devices, two of each kind, equal those on one device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ULP = 2.0**-23
# Eight devices; and code that is compiled fast rather than runs fast, which is the same HLO.
FLAGS = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)


@pytest.fixture(scope="module")
def measured():
    tests = Path(__file__).parents[1]
    environment = os.environ | {"XLA_FLAGS": FLAGS, "PYTHONPATH": str(tests.parent)}
    command = [sys.executable, str(tests / "parallel_variants_program.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["llama", "gemma", "alibi"])
def test_every_metric_of_every_step_equals_that_of_one_device(measured, name):
    one, split = measured[name]["(1, 1, 1)"], measured[name]["(2, 2, 2)"]
    for metric in ("loss", "grad_norm", "param_norm"):
        # Means and norms of thousands of numbers, each the sum over other parts: a few roundings of the result.
        np.testing.assert_allclose(split[metric], one[metric], rtol=12 * ULP, err_msg=metric)
    assert one["loss"][-1] < 0.98 * one["loss"][0]  # something was learned that could differ
