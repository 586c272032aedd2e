"""How far a network card is from an accelerator, in the levels of `nvidia-smi topo`. Pure."""

from __future__ import annotations

import dataclasses
import enum


class Distance(enum.IntEnum):
    """Nearest first. UNKNOWN is behind all: where nothing is known all ports are equally far."""

    PIX = 1
    PXB = 2
    PHB = 3
    NODE = 4
    SYS = 5
    UNKNOWN = 6

    @property
    def meaning(self) -> str:
        """In words."""
        return _MEANINGS[self]


_MEANINGS = {
    Distance.PIX: "one PCIe switch between them",
    Distance.PXB: "several PCIe switches between them",
    Distance.PHB: "the same PCIe host bridge",
    Distance.NODE: "the same NUMA node",
    Distance.SYS: "another NUMA node",
    Distance.UNKNOWN: "not known how far",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where something sits.

    Attributes:
      path: PCI addresses from the host bridge down, such as `("pci0000:00", "0000:00:01.0", "0000:01:00.0")`; empty for
        what is no PCI device.
      numa: NUMA node, -1 where unknown.
    """

    path: tuple[str, ...] = ()
    numa: int = -1


def distance(one: Place, other: Place) -> Distance:
    """How far apart two places are.

    The path of one function of a card with two differs from the other's in the last address only: PIX.
    """
    if one.path and other.path and one.path[0] == other.path[0]:
        common = 0
        for a, b in zip(one.path, other.path, strict=False):
            if a != b:
                break
            common += 1
        # Beyond the common part lie, on each side, the bridges that only it passes and the device itself.
        bridges = max(len(one.path), len(other.path)) - common - 1
        if common == 1:
            return Distance.PHB
        # A switch is two bridges in a path: one up, and one down for each device.
        return Distance.PIX if bridges <= 1 else Distance.PXB
    if one.numa >= 0 and other.numa >= 0:
        return Distance.NODE if one.numa == other.numa else Distance.SYS
    return Distance.UNKNOWN


def path_of(resolved: str) -> tuple[str, ...]:
    """The PCI path in a resolved path of /sys; empty if it has none.

    Example:
      >>> path_of("/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/infiniband/mlx5_0")
      ('pci0000:00', '0000:00:01.0', '0000:01:00.0')
    """
    parts = [part for part in resolved.split("/") if part]
    start = next((i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part), None)
    if start is None:
        return ()
    path = [parts[start]]
    for part in parts[start + 1 :]:
        if part.count(":") != 2 or "." not in part:
            break
        path.append(part)
    return tuple(path)
