"""Fused operations of a decoder block: a Pallas GPU kernel where one pays, the best plain-JAX form everywhere.

Suffixes of names give shapes: N rows (all leading axes flattened), D width of the stream, F width of the MLP,
P programs of a kernel, R rows and C columns of the tile that a program holds.
"""

from pallas_kernels.bias_gelu import bias_gelu
from pallas_kernels.residual_norm import residual_norm

__all__ = ["bias_gelu", "residual_norm"]
