"""These tests compile for GPUs that are not here; XLA's CUDA plug-in must be installed for that (see .ci/run)."""

import importlib.util

import pytest

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
PLUGIN = importlib.util.find_spec("jax_plugins") and any(map(importlib.util.find_spec, PLUGINS))


def pytest_collection_modifyitems(items):
    if not PLUGIN:
        for item in items:
            if "aot" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs jax-cuda12-plugin and its packages"))
