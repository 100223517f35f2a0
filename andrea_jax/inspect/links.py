"""A model of a step's time from its FLOPs and the bytes that it sends. Nothing here is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from andrea_jax.inspect.collectives import Collective


@dataclasses.dataclass(frozen=True)
class Links:
    """GB/s that one GPU sends, in one direction: to others of its host, and through the network."""

    host: float
    network: float | None
    source: str


NVLINK = "NVLink and one network port a GPU, half of the two-way figure of NVIDIA's data sheets"
PCIE = "PCIe 4.0 x16, in NVIDIA's data sheets; these cards have no NVLink, and no usual network"
LINKS = {
    "h200": Links(450, 50, f"{NVLINK}: 900 GB/s; ConnectX-7, 400 Gb/s, as in DGX H200"),
    "h100": Links(450, 50, f"{NVLINK}: 900 GB/s; ConnectX-7, 400 Gb/s, as in DGX H100"),
    "a100": Links(300, 25, f"{NVLINK}: 600 GB/s; ConnectX-6, 200 Gb/s, as in DGX A100"),
    "rtx4090": Links(31.5, None, PCIE),
    "rtx3060": Links(31.5, None, PCIE),
}


def seconds_on_links(collectives: Iterable[Collective], links: Links) -> tuple[float, float]:
    """Seconds that a step's collectives take within hosts, and those that cross hosts, one after the other.

    A ring that crosses hosts leaves each host through the ports of all its members there. Start-up times are left out.
    """
    within = between = 0.0
    for collective in collectives:
        if not collective.between_hosts:
            within += collective.sent / (links.host * 1e9)
        else:
            assert links.network is not None
            between += collective.sent / (min(links.host, collective.on_a_host * links.network) * 1e9)
    return within, between
