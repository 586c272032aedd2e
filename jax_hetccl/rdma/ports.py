"""One port of an RDMA device: its facts, the GID it uses, and why it cannot be used. Pure."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Mapping
from typing import Any, Self

from jax_hetccl.rdma.hca import Selection


@dataclasses.dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table.

    Attributes:
      index: its place in the table.
      gid: the address, written as IPv6.
      type: `"RoCE v2"`, `"RoCE v1"` or `"IB"`.
      netdev: the network interface it belongs to; empty on InfiniBand.
    """

    index: int
    gid: str
    type: str
    netdev: str = ""

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The address, IPv4 where the GID carries one."""
        address = ipaddress.IPv6Address(self.gid)
        return address.ipv4_mapped or address

    @property
    def speaks(self) -> str:
        """What two GIDs must have in common: packets of one kind do not reach the other."""
        return f"{self.type} over IPv{self.address.version}" if self.type == "RoCE v2" else self.type


@dataclasses.dataclass(frozen=True)
class Port:
    """One port as this process would use it.

    Attributes:
      device: the device's name, such as `mlx5_0`.
      port: its number, from 1.
      state: `"ACTIVE"`, `"DOWN"`, `"INIT"` or `"ARMED"`.
      link_layer: `"InfiniBand"` or `"Ethernet"`.
      transport: `"InfiniBand"` (RoCE too), `"iWARP"` or `"other"`.
      mtu: bytes of a packet.
      speed: of the link in Gb/s, 0 where unknown.
      lid: its address on InfiniBand.
      gid: the GID to use, None if there is none.
      numa: the NUMA node of the device, -1 where unknown.
      pci: its PCI address; empty where it has none.
      dmabuf: whether its library registers memory of other devices; whether it does itself shows when it is tried.
      no_odp: why registrations of buffers are not kept on it, empty if they are; None if it was not tried
        (HETCCL_IB_ODP).
      why_not: what speaks against using it; empty if nothing does.
    """

    device: str
    port: int
    state: str
    link_layer: str
    transport: str
    mtu: int
    speed: float
    lid: int
    gid: Gid | None
    numa: int = -1
    pci: str = ""
    dmabuf: bool = False
    no_odp: str | None = None
    why_not: str = ""

    @property
    def name(self) -> str:
        """The port as NCCL writes it, such as `mlx5_0:1`."""
        return f"{self.device}:{self.port}"

    def record(self) -> dict[str, Any]:
        """The port as plain values; `from_record` reads them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """The port that `record` made these values of."""
        gid = record["gid"]
        return cls(**{**record, "gid": None if gid is None else Gid(**gid)})


def from_native(fact: Mapping[str, Any], allowed: Selection | None, gid_index: int | None) -> Port:
    """Reads one entry of `_native.rdma_devices()` and judges it.

    Args:
      fact: the entry.
      allowed: HETCCL_IB_HCA.
      gid_index: HETCCL_IB_GID_INDEX.
    """
    gids = [Gid(**gid) for gid in fact["gids"]]
    gid = choose_gid(gids, fact["link_layer"], gid_index)
    port = Port(
        fact["name"], fact["port"], fact["state"], fact["link_layer"], fact["transport"], fact["active_mtu"],
        fact["speed_gbps"], fact["lid"], gid, fact["numa"], fact["pci"], fact["dmabuf"],
    )  # fmt: skip
    return dataclasses.replace(port, why_not=_why_not(port, gids, allowed, gid_index))


def _why_not(port: Port, gids: list[Gid], allowed: Selection | None, gid_index: int | None) -> str:
    if allowed is not None and not allowed.allows(port.device, port.port):
        return f"HETCCL_IB_HCA={allowed} leaves it out"
    if port.transport != "InfiniBand":
        return f"{port.transport} is not supported, only InfiniBand and RoCE"
    if port.state != "ACTIVE":
        return f"it is {port.state}"
    if port.gid is None:
        have = ", ".join(f"{gid.index} ({gid.type} {gid.address})" for gid in gids) or "none"
        if gid_index is not None:
            return f"it has no GID {gid_index} (HETCCL_IB_GID_INDEX); it has {have}"
        return f"it has no RoCE v2 GID (HETCCL_IB_GID_INDEX takes another one); it has {have}"
    return ""


def choose_gid(gids: list[Gid], link_layer: str, index: int | None = None) -> Gid | None:
    """The GID a port uses, or None.

    On InfiniBand the first one. On Ethernet RoCE v2, which is routed: IPv4 first, as most fabrics are set up for it, then
    IPv6, its link-local addresses last; among equals the first.

    Args:
      gids: the port's table.
      link_layer: `"InfiniBand"` or `"Ethernet"`.
      index: the user's choice, which wins.
    """
    if index is not None:
        return next((gid for gid in gids if gid.index == index), None)
    if link_layer == "InfiniBand":
        return min(gids, key=lambda gid: gid.index, default=None)

    def order(gid: Gid) -> tuple[int, int]:
        return 0 if gid.address.version == 4 else 2 if gid.address.is_link_local else 1, gid.index

    return min((gid for gid in gids if gid.type == "RoCE v2"), key=order, default=None)


def mismatch(one: Port, other: Port) -> str:
    """Why two usable ports cannot reach each other, as far as their facts tell; empty if nothing says so."""
    if one.link_layer != other.link_layer:
        return f"{one.name} is {one.link_layer}, {other.name} {other.link_layer}"
    assert one.gid and other.gid
    if one.gid.speaks != other.gid.speaks:
        return (
            f"{one.name} speaks {one.gid.speaks}, {other.name} {other.gid.speaks}; "
            "HETCCL_IB_GID_INDEX takes another of a port's GIDs"
        )
    if one.link_layer == "InfiniBand" and _subnet(one.gid) != _subnet(other.gid):
        return f"{one.name} and {other.name} are in different InfiniBand subnets"
    return ""


def _subnet(gid: Gid) -> bytes:
    return ipaddress.IPv6Address(gid.gid).packed[:8]
