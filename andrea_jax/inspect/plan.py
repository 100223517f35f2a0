"""What a run would take of GPUs that are not here: what is compiled, what a formula says, what is modelled."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from andrea_jax.inspect.collectives import Collective
from andrea_jax.inspect.compile_for import device_kind, memory_bytes
from andrea_jax.inspect.compiled_step import Cluster, CompiledStep, compiled_step, on_gpus, on_one_host
from andrea_jax.inspect.flops import flops_per_token, peak_flops
from andrea_jax.inspect.links import Links, seconds_on_links
from andrea_jax.inspect.traffic import traffic
from andrea_jax.parameters import count_parameters
from andrea_jax.settings import UserError
from andrea_jax.sharding import mesh_shape, rows_over
from andrea_jax.train.config import RunConfig

USABLE = 0.9  # of a card's memory; the rest is for CUDA, NCCL, cuDNN and gaps between buffers


def make_plan(
    config: RunConfig,
    cluster: Cluster,
    links: Links,
    mfu: float,
    against_host: bool = False,
    largest_batch: bool = False,
) -> dict[str, Any]:
    """The plan as nested dicts, each number under `given`, `compiled`, `formula` or `modelled`.

    `mfu`: share of the card's peak that its matrix products reach while they run. `against_host` compiles the same run
    on one host too; `largest_batch` two to four more steps, for the largest batch that fits.
    """
    if cluster.hosts > 1 and links.network is None:
        raise UserError(f"--network_gbs is missing: {cluster.card} has no usual network to take its speed from")
    config = on_gpus(config)
    timed = config.engine.dtype == "bfloat16"
    if against_host and (cluster.hosts == 1 or not timed):
        why = "times are modelled for bfloat16 only" if cluster.hosts > 1 else "there is one host"
        raise UserError(f"--against_host has nothing to compare: {why}")
    step = compiled_step(config, cluster)
    plan: dict[str, Any] = {
        "given": _given(config, cluster, links, mfu),
        "compiled": _compiled(cluster, step),
        "formula": _formula(config, cluster),
    }
    if config.optimizer.kind == "muon":
        optimizer = dataclasses.replace(config.optimizer, kind="adamw", momentum=None)
        plan["compiled"]["muon_extra"] = _extra(
            step, compiled_step(dataclasses.replace(config, optimizer=optimizer), cluster)
        )
    if largest_batch:
        plan["compiled"]["largest_windows_at_once"] = _largest_batch(config, cluster, step)
    peak = peak_flops(device_kind(cluster.card))
    if peak is not None and timed:
        host = compiled_step(*on_one_host(config, cluster)) if against_host else None
        plan["modelled"] = _modelled(config, cluster, step, host, links, peak, mfu)
    return plan


def _given(config: RunConfig, cluster: Cluster, links: Links, mfu: float) -> dict[str, Any]:
    train, model = config.train, config.model
    mesh = mesh_shape(config.mesh, cluster.devices)
    return {
        "card": cluster.card,
        "hosts": cluster.hosts,
        "gpus_per_host": cluster.gpus,
        "mesh": mesh,
        "batch_size": train.batch_size,
        "accumulate": train.accumulate,
        "windows_at_once": train.batch_size // (rows_over(mesh) * train.accumulate),
        "steps": train.steps,
        "tokens_per_step": train.batch_size * model.context_length,
        "optimizer": config.optimizer.kind,
        "parallel": train.parallel,
        "engine": dataclasses.asdict(config.engine),
        "parameters": count_parameters(model),
        "mfu": mfu,
        "host_gbs": links.host,
        "network_gbs": links.network,
        "links": links.source,
    }


def _compiled(cluster: Cluster, step: CompiledStep) -> dict[str, Any]:
    """Bytes and FLOPs of one device."""
    rows: dict[tuple[tuple[str, ...], str], list[Collective]] = collections.defaultdict(list)
    for collective in step.collectives:
        rows[collective.axes, collective.kind].append(collective)
    memory = memory_bytes(cluster.card)
    return {
        "memory": {name: getattr(step, name) for name in ("parameters", "optimizer", "batch", "temporaries", "other")},
        "memory_in_all": step.memory,
        "memory_of_card": memory,
        "fits": step.memory <= USABLE * memory,
        "flops": step.flops,
        "sent": [
            {
                "axes": list(axes),
                "kind": kind,
                "times": sum(collective.times for collective in found),
                "bytes": round(sum(collective.sent for collective in found)),
                "between_hosts": any(collective.between_hosts for collective in found),
            }
            for (axes, kind), found in rows.items()
        ],
        "sent_in_all": round(step.sent),
    }


def _formula(config: RunConfig, cluster: Cluster) -> dict[str, Any]:
    sent = traffic(config, cluster.devices)
    tokens = config.train.batch_size * config.model.context_length
    return {
        "flops_per_token": flops_per_token(config.model),
        "flops": flops_per_token(config.model) * tokens / cluster.devices,
        "sent": [{"axes": list(axes), "kind": kind, "bytes": round(amount)} for (axes, kind), amount in sent.items()],
        "sent_in_all": round(sum(sent.values())),
    }


def _extra(step: CompiledStep, other: CompiledStep) -> dict[str, int]:
    """What one device's share of a step has more than that of another."""
    return {
        "sent": round(step.sent - other.sent),
        "flops": step.flops - other.flops,
        "memory": step.memory - other.memory,
    }


def _modelled(
    config: RunConfig,
    cluster: Cluster,
    step: CompiledStep,
    host: CompiledStep | None,
    links: Links,
    peak: float,
    mfu: float,
) -> dict[str, Any]:
    """Times of a step in which nothing overlaps, and of one in which sending and computing overlap fully."""
    speed = peak * mfu
    tokens = config.train.batch_size * config.model.context_length
    useful = flops_per_token(config.model) * tokens / cluster.devices
    compute, within, between = _seconds(step, links, speed)
    found: dict[str, Any] = {"compute_s": compute, "host_links_s": within, "network_s": between}
    on_host = None if host is None else _step_seconds(*_seconds(host, links, speed))
    for name, seconds in _step_seconds(compute, within, between).items():
        found[name] = {
            "step_s": seconds,
            "tokens_per_s": tokens / seconds,
            "tokens_per_s_per_gpu": tokens / seconds / cluster.devices,
            "mfu": useful / seconds / peak,
            "run_h": config.train.steps * seconds / 3600,
            "efficiency_against_one_gpu": compute / seconds,
        }
        if on_host is not None:
            found[name]["efficiency_against_one_host"] = on_host[name] / seconds
    return found


def _seconds(step: CompiledStep, links: Links, speed: float) -> tuple[float, float, float]:
    return (step.flops / speed, *seconds_on_links(step.collectives, links))


def _step_seconds(compute: float, within: float, between: float) -> dict[str, float]:
    return {"no_overlap": compute + within + between, "full_overlap": max(compute, within + between)}


def _largest_batch(config: RunConfig, cluster: Cluster, step: CompiledStep) -> int:
    """The most windows of a part that fit a device, 0 if none: by a line through two compiled steps, then compiled."""
    unit = rows_over(mesh_shape(config.mesh, cluster.devices)) * config.train.accumulate
    limit, memory = USABLE * memory_bytes(cluster.card), {config.train.batch_size // unit: step.memory}

    def fits(windows: int) -> bool:
        if windows not in memory:
            train = dataclasses.replace(config.train, batch_size=windows * unit)
            memory[windows] = compiled_step(dataclasses.replace(config, train=train), cluster).memory
        return memory[windows] <= limit

    (first,) = memory
    second = 2 * first if fits(first) else max(1, first // 2)
    fits(second)
    if first == second:
        return 0
    slope = (memory[second] - memory[first]) / (second - first)
    windows = max(1, int(first + (limit - memory[first]) / slope))
    while windows and not fits(windows):
        windows -= max(1, windows // 32)
    return windows
