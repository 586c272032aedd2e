"""Which port each rank takes, and which two ports a pair of ranks meets through. Pure.

Every process computes this from what all of them published, so that both ends of a pair know what to expect.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from jax_hetccl.rdma.places import Distance
from jax_hetccl.rdma.ports import Port, mismatch

# Why there is no RDMA with HETCCL_TLS=1.
NOT_ENCRYPTED = "HETCCL_TLS=1: what a network card moves is not encrypted"


@dataclasses.dataclass(frozen=True)
class Seat:
    """A rank as far as ports are concerned.

    Attributes:
      host: the machine it runs on; ranks of one host share its ports.
      owner: the process it belongs to, for messages.
      ports: what its process may use, in the order in which it was published.
      distances: from the rank's accelerator to each of them.
      missing: why `ports` is empty, where it is.
    """

    host: str
    owner: str
    ports: tuple[Port, ...] = ()
    distances: tuple[Distance, ...] = ()
    missing: str = ""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A port that a rank may take.

    Attributes:
      index: its place in the process's ports.
      port: the port.
      distance: from the rank's accelerator.
      why: for people.
    """

    index: int
    port: Port
    distance: Distance
    why: str


@dataclasses.dataclass(frozen=True)
class Link:
    """The two ports of a pair of ranks."""

    mine: Choice
    theirs: Choice

    def __str__(self) -> str:
        return f"{self.mine.port.name} here and {self.theirs.port.name} there"


@dataclasses.dataclass(frozen=True)
class NoLink:
    """Why a pair of ranks has no two ports.

    Attributes:
      why: for people.
      surprising: both sides have devices that the user did not exclude, so that somebody may expect them to be used.
    """

    why: str
    surprising: bool


def assign(seats: Mapping[int, Seat]) -> dict[int, tuple[Choice, ...]]:
    """The usable ports of every rank, the one it takes first.

    A rank takes the nearest port. Equally near ones are shared out among the ranks of a host, in proportion to their
    speed, in rank order; what remains equal goes by name. The others follow in the same order of preference: a pair whose
    first ports do not fit may meet through them.

    Args:
      seats: all ranks.
    """
    # Ranks by host and device, and by host and port: both ports of a card share its PCIe link.
    taken: collections.Counter[tuple[str, str]] = collections.Counter()
    chosen = {}
    for rank, seat in sorted(seats.items()):

        def burden(item: tuple[int, Port]) -> tuple[Distance, float, int, str, int]:
            index, port = item
            share = (taken[seat.host, port.device] + 1) / max(port.speed, 1.0)
            return seat.distances[index], share, taken[seat.host, port.name], port.device, port.port

        usable = [(index, port) for index, port in enumerate(seat.ports) if not port.why_not]
        order = sorted(usable, key=burden)
        nearest = [port for index, port in order if seat.distances[index] == seat.distances[order[0][0]]]
        chosen[rank] = tuple(
            Choice(index, port, seat.distances[index], _why(seat.distances[index], port, nearest, len(order)))
            for index, port in order
        )
        if order:
            first = order[0][1]
            taken.update([(seat.host, first.device), (seat.host, first.name)])
    return chosen


def _why(distance: Distance, port: Port, nearest: Sequence[Port], usable: int) -> str:
    if usable == 1:
        return f"the only usable port ({distance.meaning})"
    if port not in nearest:
        return f"farther: {distance.meaning}"
    if len(nearest) == 1:
        return f"the nearest: {distance.meaning}"
    others = ", ".join(other.name for other in nearest if other != port)
    return f"as near as {others}, shared out by speed ({distance.meaning})"


def link(src: Seat, dst: Seat, mine: Sequence[Choice], theirs: Sequence[Choice]) -> Link | NoLink:
    """The ports that two ranks meet through: their first ones, or the first ones that can reach each other.

    Args:
      src: the rank that sends.
      dst: the rank that receives.
      mine: the ports of `src`, from `assign`.
      theirs: those of `dst`.
    """
    lacking = [_lacking(seat) for seat, options in ((src, mine), (dst, theirs)) if not options]
    if lacking:
        return NoLink("; ".join(lacking), _equipped(src) and _equipped(dst))
    pairs = [(i + k, i, a, b) for i, a in enumerate(mine) for k, b in enumerate(theirs)]
    pairs.sort(key=lambda pair: pair[:2])
    for _, _, a, b in pairs:
        if not mismatch(a.port, b.port):
            return Link(a, b)
    return NoLink(f"{src.owner} and {dst.owner}: {mismatch(mine[0].port, theirs[0].port)}", True)


def _lacking(seat: Seat) -> str:
    ports = "; ".join(f"{port.name}: {port.why_not}" for port in seat.ports)
    return f"{seat.owner} has no usable port ({ports or seat.missing or 'no RDMA device'})"


def _equipped(seat: Seat) -> bool:
    return any(not port.why_not.startswith("HETCCL_IB_HCA") for port in seat.ports)


def attempts(wanted: str, shm: str, rdma: str) -> tuple[str, ...]:
    """The transports to try for a pair, in this order.

    Args:
      wanted: HETCCL_TRANSPORT.
      shm: what speaks against shared memory; empty if nothing does.
      rdma: what speaks against RDMA, likewise.

    Example:
      >>> attempts("auto", "another host", ""), attempts("auto", "", ""), attempts("tcp", "", "")
      (('rdma', 'tcp'), ('shm', 'rdma', 'tcp'), ('tcp',))
    """
    if wanted != "auto":
        return (wanted,)
    return (*(["shm"] if not shm else []), *(["rdma"] if not rdma else []), "tcp")


def slots(port: Port, dma_buf: int | None, gpu: bool) -> tuple[str, str]:
    """Where the slots of a rank on this port are to lie, and why: `"device"` or `"host"` memory.

    With a CPU the reason ends with what becomes of registrations of buffers, if HETCCL_IB_ODP asks for them to be kept.

    Args:
      port: the port.
      dma_buf: whether the accelerator exports its memory, None if not known.
      gpu: whether the accelerator has memory of its own.
    """
    if not gpu:
        why = "a CPU's memory is the host's"
        if port.no_odp:
            why += f"; buffers are registered for each exchange: {port.no_odp}"
        elif port.no_odp is not None:
            why += "; registrations of buffers are kept"
        return "host", why
    ways = "by dma-buf or as peer memory"
    if not port.dmabuf:
        ways = "as peer memory (the installed libibverbs knows no dma-buf)"
    elif dma_buf == 0:
        ways = "as peer memory (the accelerator exports no dma-buf)"
    return "device", f"if {port.device} registers it {ways}, which is tried when a channel opens; else host"
