"""What a run on GPUs needs to give the same bits each time; on CPU nothing is needed.

One flag of XLA ends three sources at once: kernels chosen by timing them when compiling (autotuning), rows of a
gradient added in the order of arrival (scatter into the token table), and the same inside cuDNN's attention backward.
On several GPUs NCCL may also add inside the NVLink switch, in an order that it does not promise.
"""

from __future__ import annotations

from collections.abc import Mapping

OPS = "--xla_gpu_deterministic_ops"
FINER = ("--xla_gpu_exclude_nondeterministic_ops", "--xla_gpu_autotune_level")  # together they do the same
NCCL, ORDERED = "NCCL_ALGO", ("^NVLS", "Ring", "Tree", "CollnetDirect", "CollnetChain")


def xla_flags(environment: Mapping[str, str]) -> dict[str, str]:
    """{flag: value} of XLA_FLAGS; a flag without a value is `true`, the last of several counts."""
    words = (word.partition("=") for word in environment.get("XLA_FLAGS", "").split())
    return {name: value if equals else "true" for name, equals, value in words}


def with_xla_flags(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The environment with these flags in XLA_FLAGS; None takes one out."""
    flags = {name: value for name, value in (xla_flags(environment) | dict(changes)).items() if value is not None}
    return {**environment, "XLA_FLAGS": " ".join(f"{name}={value}" for name, value in flags.items())}


def missing(environment: Mapping[str, str], gpus: int) -> dict[str, str]:
    """{flag or variable: the value it needs} of what the environment lacks for equal bits on so many GPUs."""
    if not gpus:
        return {}
    flags = xla_flags(environment)
    on = {name for name, value in flags.items() if value.lower() in ("true", "1")}
    lacking = {}
    if OPS not in on and not (FINER[0] in on and flags.get(FINER[1]) == "0"):
        lacking[OPS] = "true"
    if gpus > 1 and environment.get(NCCL) not in ORDERED:
        lacking[NCCL] = ORDERED[0]
    return lacking


def deterministic(environment: Mapping[str, str], gpus: int) -> dict[str, str]:
    """The environment with all that `missing` names."""
    lacking = missing(environment, gpus)
    variables = {name: value for name, value in lacking.items() if not name.startswith("--")}
    flags = {name: value for name, value in lacking.items() if name.startswith("--")}
    return (with_xla_flags(environment, flags) if flags else dict(environment)) | variables


def fast(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without anything of this kind: what a run is that need not repeat its bits."""
    found = {name: None for name in (OPS, *FINER) if name in xla_flags(environment)}
    without = with_xla_flags(environment, found) if found else dict(environment)
    return {name: value for name, value in without.items() if name != NCCL}
