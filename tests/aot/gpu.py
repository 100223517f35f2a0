"""Compiling for a GPU that is described, not present. Needs the CUDA plug-in; see .ci/run for the packages."""

from andrea_jax.inspect.compile_for import compile_for

__all__ = ["compile_for"]
