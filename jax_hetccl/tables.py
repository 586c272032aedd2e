"""A world as tables for people."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_hetccl.island import ClusterInfo
from jax_hetccl.rdma.choose import Choice

if TYPE_CHECKING:
    from rich.table import Table


def world(
    title: str,
    clusters: Sequence[ClusterInfo],
    here: int,
    choices: Mapping[int, Sequence[Choice]],
    routed: Sequence[Mapping[str, Any]],
) -> str:
    """The clusters, and where there are any, GPUs and RDMA ports by rank.

    Args:
      title: of the first table.
      clusters: all of them.
      here: the index of this process's.
      choices: by rank, the ports it may take.
      routed: this process's channels that go by a port, from the engine's stats.
    """
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(_clusters(title, clusters, here))
    if any(info.gpus for info in clusters):
        console.print(_gpus(clusters))
    if any(choices.values()):
        console.print(_ports(choices, routed))
    return console.file.getvalue()  # type: ignore[attr-defined]


def _clusters(title: str, clusters: Sequence[ClusterInfo], here: int) -> Table:
    from rich.table import Table

    table = Table("cluster", "ranks", "processes", "devices", "jax", title=title)
    for info in clusters:
        ranks = f"{info.first_rank}-{info.first_rank + info.devices - 1}"
        kinds = f"{info.devices} {info.platform} ({', '.join(info.device_kinds)})"
        name = info.name + (" (here)" if info.index == here else "")
        table.add_row(name, ranks, str(info.processes), kinds, info.jax_version)
    return table


def _gpus(clusters: Sequence[ClusterInfo]) -> Table:
    """GPUs by rank, as far as the vendors' bindings show them."""
    from rich.table import Table

    table = Table("rank", "PCI", "NUMA", "stream memory operations", "dma-buf", "GPUDirect RDMA")
    for info in clusters:
        for rank, gpu in enumerate(info.gpus, info.first_rank):
            yes = [{None: "?", 0: "no"}.get(v, "yes") for v in (gpu.stream_memops, gpu.dma_buf, gpu.gpu_direct_rdma)]
            table.add_row(str(rank), gpu.pci or "?", "?" if gpu.numa is None else str(gpu.numa), *yes)
    return table


def _ports(choices: Mapping[int, Sequence[Choice]], routed: Sequence[Mapping[str, Any]]) -> Table:
    """The port of every rank, and where the slots of this process's ranks lie, once a channel is open."""
    from rich.table import Table

    slots = {channel["local_rank"]: channel["slots"] for channel in routed}
    table = Table("rank", "RDMA port", "why", "slots")
    for rank, options in choices.items():
        port, why = (options[0].port.name, options[0].why) if options else ("none", "no port is usable")
        table.add_row(str(rank), port, why, slots.get(rank, ""))
    return table
