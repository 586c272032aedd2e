"""What this machine has: ports from the native module (through libibverbs), places from /sys."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence

from jax_hetccl.rdma.hca import Selection
from jax_hetccl.rdma.places import Distance, Place, distance, path_of
from jax_hetccl.rdma.ports import Port, from_native

_SYS = pathlib.Path("/sys")


@dataclasses.dataclass(frozen=True)
class Found:
    """The ports of this machine.

    Attributes:
      ports: all of them, the unusable ones with what speaks against them.
      missing: why there are none, where there are none.
    """

    ports: tuple[Port, ...] = ()
    missing: str = ""


def find(allowed: Selection | None = None, gid_index: int | None = None, odp: bool = False) -> Found:
    """Looks at the RDMA devices of this machine. Never raises: a machine without any is an ordinary one.

    Args:
      allowed: HETCCL_IB_HCA.
      gid_index: HETCCL_IB_GID_INDEX.
      odp: HETCCL_IB_ODP; then on-demand paging is tried on each usable port, which takes seconds at most.
    """
    try:
        from jax_hetccl import _native

        facts = _native.rdma_devices()
    except (ImportError, RuntimeError) as error:
        return Found(missing=str(error).removeprefix("hetccl: "))
    ports = tuple(from_native(fact, allowed, gid_index) for fact in facts)
    if odp:
        ports = tuple(port if port.why_not else dataclasses.replace(port, no_odp=_no_odp(port)) for port in ports)
    return Found(ports, "" if ports else "no RDMA device")


def _no_odp(port: Port) -> str:
    from jax_hetccl import _native

    assert port.gid is not None
    return _native.why_not_on_demand({"device": port.device, "port": port.port, "gid_index": port.gid.index})


def distances(ports: Iterable[Port], place: Place) -> tuple[Distance, ...]:
    """How far `place` is from each port."""
    return tuple(distance(place, place_of_port(port)) for port in ports)


def place_of_port(port: Port) -> Place:
    """Where the card of a port sits; a software device sits where its network card does."""
    candidates = [_SYS / "class/infiniband" / port.device / "device"]
    if port.gid and port.gid.netdev:
        candidates.append(_SYS / "class/net" / port.gid.netdev / "device")
    for candidate in candidates:
        if path := path_of(os.path.realpath(candidate)):
            return Place(path, port.numa)
    return Place((), port.numa)


def place_of_pci(pci: str | None, numa: int | None) -> Place:
    """Where the PCI device with address `pci` sits."""
    path = path_of(os.path.realpath(_SYS / "bus/pci/devices" / pci)) if pci else ()
    return Place(path, -1 if numa is None else numa)


def place_of_process(cpus: Sequence[int] | None = None, nodes: pathlib.Path | None = None) -> Place:
    """Where this process computes: the NUMA node that all its CPUs belong to; of none if they belong to several.

    Args:
      cpus: by default those that this process may run on.
      nodes: the folder that lists the nodes, by default the kernel's.
    """
    mine = set(os.sched_getaffinity(0) if cpus is None else cpus)
    for node in sorted((nodes or _SYS / "devices/system/node").glob("node[0-9]*")):
        try:
            if mine <= _cpu_list((node / "cpulist").read_text()):
                return Place((), int(node.name.removeprefix("node")))
        except (OSError, ValueError):
            continue
    return Place()


def _cpu_list(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found
