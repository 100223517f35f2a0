"""Other people's JAX kernels for the benchmarked operations, where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from bench.formulas import EPS

Form = Callable[..., Any]


def jax_peers(V: int) -> dict[str, dict[str, Form]]:
    """{operation: {peer: function of the operation's arguments}}; a peer that cannot be imported is left out."""
    peers: dict[str, dict[str, Form]] = {}
    for name, load in (("pallas.ops.gpu", _pallas_ops), ("tokamax", partial(_tokamax, V))):
        try:
            functions = load()
        except ImportError:
            continue
        for operation, function in functions.items():
            peers.setdefault(operation, {})[name] = function
    return peers


def _pallas_ops() -> dict[str, Form]:
    from jax.experimental.pallas.ops.gpu.layer_norm import layer_norm
    from jax.experimental.pallas.ops.gpu.rms_norm import rms_norm

    return {  # they want [B, T, D], with B on the only grid axis that has no limit
        "norm": lambda x, gain, shift: layer_norm(x[:, None], gain, shift, eps=EPS)[:, 0],
        "rms_norm": lambda x, gain: rms_norm(x[:, None], gain, 0 * gain, eps=EPS)[:, 0],
    }


def _tokamax(V: int) -> dict[str, Form]:
    import tokamax

    def head(x: Any, head: Any, labels: Any, weights: Any) -> Any:
        return tokamax.linear_softmax_cross_entropy_loss(x, labels, head[:, :V].astype(x.dtype))

    return {
        "norm": lambda x, gain, shift: tokamax.layer_norm(x, gain, shift, epsilon=EPS),
        "rms_norm": lambda x, gain: tokamax.layer_norm(x, gain, None, epsilon=EPS, subtract_mean=False),
        "cross_entropy": head,
    }
