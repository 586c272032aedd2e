"""A machine as exchanges see it: its accelerators, its RDMA ports, and how far they are from each other."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Self

from jax_hetccl import gpus
from jax_hetccl._host import boot_id
from jax_hetccl.rdma import choose, discover
from jax_hetccl.rdma.choose import Choice, Link, NoLink, Seat
from jax_hetccl.rdma.hca import Selection
from jax_hetccl.rdma.places import Distance
from jax_hetccl.rdma.ports import Port


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """What computes for a rank.

    Attributes:
      name: such as `cuda 0`; `cpu` where the host itself computes.
      pci: its PCI address, empty for a CPU.
      numa: its NUMA node, -1 where unknown.
      dma_buf: whether its memory can be exported to a network card, None where unknown.
    """

    name: str
    pci: str = ""
    numa: int = -1
    dma_buf: int | None = None

    @property
    def gpu(self) -> bool:
        """Whether it has memory of its own."""
        return self.name != "cpu"


@dataclasses.dataclass(frozen=True)
class Machine:
    """One machine.

    Attributes:
      name: its host name.
      boot: identifies the running kernel: programs that see the same one share memory.
      accelerators: its GPUs, or the one CPU.
      ports: its RDMA ports.
      missing: why there are none.
      distances: for each accelerator, to each port.
    """

    name: str
    boot: str
    accelerators: tuple[Accelerator, ...]
    ports: tuple[Port, ...]
    missing: str
    distances: tuple[tuple[Distance, ...], ...]

    def record(self) -> dict[str, Any]:
        """The machine as plain values; `from_record` reads them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """The machine that `record` made these values of. KeyError or TypeError if it did not."""
        return cls(
            record["name"],
            record["boot"],
            tuple(Accelerator(**a) for a in record["accelerators"]),
            tuple(Port.from_record(p) for p in record["ports"]),
            record["missing"],
            tuple(tuple(Distance(d) for d in row) for row in record["distances"]),
        )


def this_machine(allowed: Selection | None = None, gid_index: int | None = None, odp: bool = False) -> Machine:
    """Looks at this machine: GPUs through the vendors' bindings, ports through the native module.

    Args:
      allowed: HETCCL_IB_HCA.
      gid_index: HETCCL_IB_GID_INDEX.
      odp: HETCCL_IB_ODP.
    """
    found = discover.find(allowed, gid_index, odp)
    accelerators = tuple(_gpus()) or (Accelerator("cpu", "", discover.place_of_process().numa),)
    rows = tuple(
        discover.distances(found.ports, discover.place_of_pci(accelerator.pci, accelerator.numa))
        for accelerator in accelerators
    )
    return Machine(socket.gethostname(), boot_id(), accelerators, found.ports, found.missing, rows)


def _gpus() -> Iterator[Accelerator]:
    for platform in gpus.EXTRAS:
        try:
            for gpu in gpus.describe(platform):
                numa = -1 if gpu.numa is None else gpu.numa
                yield Accelerator(f"{platform} {gpu.ordinal}", gpu.pci or "", numa, gpu.dma_buf)
        except gpus.BindingsError:  # the doctor says which extra is missing
            continue


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank that an accelerator would have, if each had one and machines were clusters."""

    machine: Machine
    accelerator: Accelerator
    seat: Seat
    choices: tuple[Choice, ...]


def ranks(machines: Sequence[Machine]) -> list[Rank]:
    """One rank for each accelerator of each machine, with the ports that it would take."""
    every = [(machine, i) for machine in machines for i in range(len(machine.accelerators))]
    seats = {
        rank: Seat(machine.boot or machine.name, machine.name, machine.ports, machine.distances[i], machine.missing)
        for rank, (machine, i) in enumerate(every)
    }
    chosen = choose.assign(seats)
    return [Rank(m, m.accelerators[i], seats[rank], chosen[rank]) for rank, (m, i) in enumerate(every)]


def transport(wanted: str, one: Rank, other: Rank, no_rdma: str = "") -> tuple[str, str]:
    """The transport that a pair would try first, and why; `"none"` if a forced one cannot work.

    Args:
      wanted: HETCCL_TRANSPORT.
      one: the rank that sends.
      other: the rank that receives.
      no_rdma: what speaks against RDMA between any two ranks, if something does.
    """
    one_host = one.machine.boot == other.machine.boot != ""
    no_shm = "" if one_host else "the ranks run on two hosts"
    link = choose.link(one.seat, other.seat, one.choices, other.choices)
    no_rdma = no_rdma or (link.why if isinstance(link, NoLink) else "")
    first = choose.attempts(wanted, no_shm, no_rdma)[0]
    if against := {"shm": no_shm, "rdma": no_rdma}.get(first):
        return "none", f"HETCCL_TRANSPORT={wanted}, but {against}"
    if first == "shm":
        return first, "one host"
    if first == "rdma":
        assert isinstance(link, Link)
        return (
            first,
            f"{link.mine.port.name} to {link.theirs.port.name}, if a probe gets through when the channel opens",
        )
    return first, f"HETCCL_TRANSPORT={wanted}" if wanted == "tcp" else no_rdma
