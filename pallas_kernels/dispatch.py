"""Which form of an operation runs, XLA's, a Pallas kernel or a Triton kernel, and why."""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from pallas_kernels import launch, triton_launch
from pallas_kernels.shard import over_rows

Implementation = Literal["auto", "xla", "pallas", "jax_triton"]
IMPLEMENTATIONS = get_args(Implementation)
KERNELS: tuple[Implementation, ...] = ("pallas", "jax_triton")
DTYPES = ("float32", "bfloat16", "float16")
TYPICAL = (8192, 768)
MAX_ROWS = 2**30  # row numbers are int32
MAX_WIDTH = {
    "residual_norm": 8192,
    "bias_gelu": 2**30,
    "cross_entropy": 2**30,
    "gates": 2**30,
}  # a norm's program holds whole rows in registers
OLDEST = 8.0  # compute capability: Ampere
TRITON = ("residual_norm", "bias_gelu")  # have a Triton kernel of their backward pass, for jax-triton


class Default(NamedTuple):
    """What `auto` runs on a GPU, and why."""

    form: Literal["xla", "pallas"]
    why: str


CROSS_ENTROPY = Default(
    "pallas", "one read of the logits and one write of their gradient, against three reads and a write"
)
GATES = Default("xla", "XLA's one kernel moves as few bytes, and can fuse with the product before")
# Bytes compiled for an H200 at 65,536 rows of bfloat16 (README.md has the table and the command), not timings:
# no GPU has spoken yet. u is one [N, D] array, U one [N, F] array.
AUTO: dict[tuple[str, str], Default] = {
    ("residual_norm", "forward"): Default(
        "xla", "5.0u against 6.0u with the product before, in whose epilogue XLA adds"
    ),
    ("residual_norm", "backward"): Default("pallas", "3.1u against 5.1u: a row is read once, for means and sums alike"),
    ("bias_gelu", "forward"): Default("xla", "elementwise: 3U either way, and XLA may fuse it with the product before"),
    ("bias_gelu", "backward"): Default("pallas", "3.0U as XLA's best, but in loads of 16 bytes where XLA's take 2"),
    ("cross_entropy", "forward"): CROSS_ENTROPY,
    ("cross_entropy", "backward"): CROSS_ENTROPY,
    ("gates", "forward"): GATES,
    ("gates", "backward"): GATES,
}
NOTHING_TO_SUM = Default("xla", "without a parameter gradient to sum it is elementwise, which XLA does as well")


class Plan(NamedTuple):
    """Which directions run as kernels; `interpret`: also where there is no GPU, in Pallas' interpreter; `sharding`: of
    the rows over devices, None where there is one or all is inside shard_map."""

    forward: bool
    backward: bool
    interpret: bool
    sharding: NamedSharding | None = None
    triton: bool = False  # the kernels are called through jax-triton


XLA = Plan(False, False, False)


def support(
    operation: str,
    shape: tuple[int, ...],
    dtype: Any,
    implementation: Implementation = "pallas",
    platform: str | None = None,
    capability: str | None = None,
) -> list[str]:
    """The reasons why `implementation` cannot run `operation` on an array [..., width]; none: it can.

    `platform` ("cpu", "gpu") and the compute `capability` ("8.6") are this process's unless given.
    """
    if implementation in ("auto", "xla"):
        return []
    if implementation == "jax_triton" and operation not in TRITON:
        return [f"no jax-triton kernel is written for {operation}"]
    here = platform is None
    platform = platform or jax.default_backend()
    if platform == "gpu" and capability is None:
        capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    width = shape[-1]
    rows = math.prod(shape[:-1])
    reasons = []
    if implementation == "jax_triton":
        reasons += triton_launch.obstacles(capability)
    elif launch.pltriton is None:
        reasons.append(f"jax {jax.__version__} has no Triton back end for Pallas")
    if platform != "gpu":
        reasons.append(f"the platform is {platform}, not an NVIDIA GPU")
    elif not _recent(capability):
        reasons.append(f"the compute capability is {capability}; a kernel needs an NVIDIA GPU of {OLDEST} or later")
    elif here and implementation == "pallas" and launch.pltriton is not None and (refusal := launch.refusal()):
        reasons.append(f"jax {jax.__version__} refuses this GPU: {refusal}")
    if jnp.dtype(dtype).name not in DTYPES:
        reasons.append(f"the dtype is {jnp.dtype(dtype).name}, not one of {', '.join(DTYPES)}")
    if width > MAX_WIDTH[operation]:
        reasons.append(
            f"a row of {width} numbers does not fit the registers of a program; at most {MAX_WIDTH[operation]}"
        )
    if rows > MAX_ROWS:
        reasons.append(f"{rows} rows are more than {MAX_ROWS}")
    return reasons


def _recent(capability: str | None) -> bool:
    try:
        return float(capability or "") >= OLDEST
    except ValueError:  # AMD's are names
        return False


def where_written(operation: str, implementation: Implementation) -> Implementation:
    """What a model's one switch means for an operation: jax-triton has a kernel for some, the others are XLA's."""
    return "xla" if implementation == "jax_triton" and operation not in TRITON else implementation


def plan(
    operation: str,
    shape: tuple[int, ...],
    dtype: Any,
    implementation: Implementation,
    sums: bool = True,
    sharding: NamedSharding | None = None,
    **where: Any,
) -> Plan:
    """How to run `operation`; not `sums`: its backward pass is elementwise, no parameter's gradient is summed.

    An explicit "pallas" runs both directions as kernels, interpreted where the code is lowered for no GPU; "jax_triton"
    the backward pass as a kernel, and only in a process that has a GPU.

    Raises:
        UserError: an implementation that there is not, or that cannot, with all reasons.
    """
    if implementation not in IMPLEMENTATIONS:
        raise user_error(f"implementation = {implementation!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "xla" or 0 in shape:
        return XLA
    if implementation == "auto":
        return _automatic(operation, shape, dtype, sums, sharding, **where)
    # On a CPU it is interpreted, or compiled for a GPU elsewhere: only reasons that hold on every GPU count.
    if implementation == "pallas" and jax.default_backend() == "cpu" and not where:
        where = {"platform": "gpu", "capability": "8.0"}
    if reasons := support(operation, shape, dtype, implementation, **where):
        raise user_error(f"{operation}: implementation = {implementation!r} cannot run: " + "; ".join(reasons))
    if implementation == "jax_triton":
        return Plan(False, True, False, sharding, triton=True)
    return Plan(True, True, True, sharding)


def _automatic(
    operation: str, shape: tuple[int, ...], dtype: Any, sums: bool, sharding: NamedSharding | None, **where: Any
) -> Plan:
    reasons = support(operation, shape, dtype, "pallas", **where)
    if sharding is None and jax.device_count() > 1 and not jax.sharding.get_abstract_mesh().manual_axes:
        reasons.append(
            f"without `sharding` and outside shard_map, jit would gather what lies on the {jax.device_count()} devices"
        )
    if reasons:
        _say(f"{operation}: xla, because " + "; ".join(reasons))
        return XLA
    forward, backward = AUTO[operation, "forward"], AUTO[operation, "backward"] if sums else NOTHING_TO_SUM
    _say(f"{operation}: forward {forward.form} ({forward.why}), backward {backward.form} ({backward.why})")
    return Plan(forward.form == "pallas", backward.form == "pallas", False, sharding)


def kernels(operation: str, plan: Plan) -> Any:
    """The module with the operation's kernels; Triton is imported only where it is asked for."""
    return importlib.import_module(f"pallas_kernels.{operation}_{'triton' if plan.triton else 'kernel'}")


def run(
    operation: str,
    kernel: bool,
    plan: Plan,
    pallas: Callable[..., Any],
    xla: Callable[..., Any],
    *args: Any,
    roles: tuple[str, str] = ("", ""),
) -> Any:
    """`xla(*args)`, or if `kernel` what `pallas` gives; decided where it is lowered, so a CPU can compile for a GPU.

    `roles` are `over_rows`' letters of arguments and results, for rows that are split over devices.
    """
    if not kernel:
        return xla(*args)
    elsewhere = functools.partial(pallas, interpret=True) if plan.interpret else xla

    @jax.custom_jvp
    def first_order(*args: Any) -> Any:
        chosen = functools.partial(jax.lax.platform_dependent, cuda=pallas, default=elsewhere)
        return over_rows(chosen, plan.sharding, *roles)(*args)

    @first_order.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise user_error(f"{operation}: a kernel has first derivatives only; use implementation='xla' for more")

    return first_order(*args)


@functools.cache
def _say(line: str) -> None:
    logging.getLogger(__name__).info(line)


def user_error(message: str) -> ValueError:
    from andrea_jax.settings import UserError  # here, because andrea_jax imports this package

    return UserError(message)


def matrix() -> Iterator[tuple[str, str, str, str, str]]:
    """(operation, platform, dtype, the kernels that run there when asked for, what `auto` runs) for each place."""
    places = [("cpu", None), *(("gpu", capability) for capability in ("7.5", "8.0", "8.6", "8.9", "9.0"))]
    for operation in MAX_WIDTH:
        for platform, capability in places:
            for dtype in (*DTYPES, "float64"):
                reasons = support(operation, TYPICAL, dtype, "pallas", platform, capability)
                forms = (AUTO[operation, direction].form for direction in ("forward", "backward"))
                answer = "xla: " + "; ".join(reasons) if reasons else "forward {}, backward {}".format(*forms)
                asked = [name for name in KERNELS if not support(operation, TYPICAL, dtype, name, platform, capability)]
                yield operation, f"{platform} {capability or ''}".strip(), dtype, ", ".join(asked) or "-", answer


def table() -> str:
    """The support matrix as text, and this machine's line for each operation."""
    lines = ["{:14} {:8} {:9} {:18} {}".format("operation", "platform", "dtype", "kernels", "auto")]
    lines += ["{:14} {:8} {:9} {:18} {}".format(*row) for row in matrix()]
    for operation in MAX_WIDTH:
        for name in KERNELS:
            reasons = support(operation, TYPICAL, "bfloat16", name)
            lines.append(f"{operation:14} here     bfloat16  {name:18} " + ("; ".join(reasons) or "can run"))
    return "\n".join(lines)
