"""The benchmarked operations in PyTorch, eager and compiled, and Liger's kernels, where they are installed.

Each is a function of torch tensors with the operation's arguments, of which the head is [V, D], without padding and in
the activations' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from bench.formulas import EPS

Form = Callable[..., Any]


def torch_peers() -> dict[str, dict[str, Form]]:
    """{operation: {peer: function}}; empty without torch, and compiled and Liger's kernels only on a GPU."""
    try:
        import torch
    except ImportError:
        return {}
    peers = {name: {"torch": f} for name, f in _eager(torch).items()}
    if torch.cuda.is_available():
        for name, f in _eager(torch).items():
            peers[name]["torch.compile"] = torch.compile(f)
        for name, f in _liger().items():
            peers[name]["liger"] = f
    return peers


def _eager(torch: Any) -> dict[str, Form]:
    F = torch.nn.functional

    def norm(x: Any, gain: Any, shift: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], gain.to(x.dtype), shift.to(x.dtype), EPS)

    def add_norm(x: Any, delta: Any, gain: Any, shift: Any) -> Any:
        stream = x + delta
        return stream, norm(stream, gain, shift)

    def head(x: Any, head: Any, labels: Any, weights: Any) -> Any:
        logits = (x @ head.T).float()
        return (weights * F.cross_entropy(logits, labels, reduction="none")).sum()

    return {
        "norm": norm,
        "rms_norm": lambda x, gain: F.rms_norm(x, x.shape[-1:], gain.to(x.dtype), EPS),
        "add_norm": add_norm,
        "stream_norm": lambda x, gain, shift: (x * 1, norm(x, gain, shift)),
        "gelu": lambda h, bias: F.gelu(h + bias.to(h.dtype), approximate="tanh"),
        "swiglu": lambda gate, up: F.silu(gate) * up,
        "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
        "cross_entropy": head,
    }


def _liger() -> dict[str, Form]:
    try:
        from liger_kernel.transformers import functional as liger
    except ImportError:
        return {}
    return {
        "norm": lambda x, gain, shift: liger.liger_layer_norm(x, gain, shift, EPS),
        "rms_norm": lambda x, gain: liger.liger_rms_norm(x, gain, EPS, in_place=False),
        "swiglu": liger.liger_swiglu,
        "geglu": liger.liger_geglu,
        "cross_entropy": lambda x, head, labels, weights: liger.liger_fused_linear_cross_entropy(
            x, head, labels, reduction="sum"
        ),
    }


def to_torch(arguments: Any, V: int | None = None) -> list[Any]:
    """Arrays as tensors, on the GPU if there is one; with V the second is the head. Numbers ask for a gradient."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = []
    for place, x in enumerate(arguments):
        kind = {"bfloat16": torch.bfloat16, "int32": torch.int64}.get(str(x.dtype), torch.float32)
        values = np.array(x, np.int64 if kind is torch.int64 else np.float32)
        if V and place == 1:
            values, kind = np.ascontiguousarray(values[:, :V].T), tensors[0].dtype
        tensor = torch.from_numpy(values).to(device, kind)
        tensors.append(tensor.requires_grad_() if tensor.is_floating_point() else tensor)
    return tensors


def from_torch(tensors: Any, V: int | None = None, columns: int = 0) -> list[Any]:
    """The results as float32 arrays, None where there is none; the gradient of the head as [D, columns] again."""
    arrays = [None if t is None else t.detach().float().cpu().numpy() for t in tensors]
    if V and len(arrays) > 1:
        arrays[1] = np.pad(arrays[1].T, [(0, 0), (0, columns - V)])
    return arrays


def direct(f: Form, tensors: list[Any], direction: str, dys: list[Any] | None) -> Callable[[], Any]:
    """The direction of `f` as a call without arguments that returns tensors."""
    import torch

    def results() -> list[Any]:
        found = f(*tensors)
        return list(found) if isinstance(found, tuple) else [found]

    if direction == "forward":
        return torch.no_grad()(results)
    inputs = [t for t in tensors if t.requires_grad]
    if direction == "gradient":
        return lambda: torch.autograd.grad(results(), inputs, allow_unused=True)
    outputs = results()
    dys = dys or [torch.randn_like(y) for y in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, dys, retain_graph=True)


def finish(_: Any) -> None:
    """Waits for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
