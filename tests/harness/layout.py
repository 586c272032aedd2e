"""Which clusters a world has, how many processes each has, and how many devices each process has."""

from __future__ import annotations

import dataclasses

_NAMES = ("left", "right", "third", "fourth")


@dataclasses.dataclass(frozen=True)
class Layout:
    """Devices per process, per cluster: ``1+1/2`` is a cluster of two 1-device processes and one of 2 devices."""

    clusters: tuple[tuple[int, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads the form that test ids use, e.g. ``"2/1"``."""
        return cls(tuple(tuple(int(n) for n in part.split("+")) for part in text.split("/")))

    def __str__(self) -> str:
        return "/".join("+".join(map(str, processes)) for processes in self.clusters)

    @property
    def devices(self) -> tuple[int, ...]:
        """How many devices each cluster has."""
        return tuple(sum(processes) for processes in self.clusters)

    @property
    def total(self) -> int:
        return sum(self.devices)

    def name(self, cluster: int) -> str:
        return _NAMES[cluster]

    def names(self) -> str:
        """The HETCCL_CLUSTERS setting."""
        return ",".join(f"{self.name(c)}:{len(processes)}" for c, processes in enumerate(self.clusters))

    def members(self) -> list[tuple[int, int, int]]:
        """(cluster, process, devices) of every process, in rank order."""
        return [(c, p, n) for c, processes in enumerate(self.clusters) for p, n in enumerate(processes)]
