"""Which ports the ranks of a world reach each other through."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax_hetccl._config import Config
from jax_hetccl.gpus import Gpu
from jax_hetccl.rdma import choose, discover
from jax_hetccl.rdma.choose import Choice, Link, NoLink, Seat
from jax_hetccl.rdma.places import Distance
from jax_hetccl.rdma.ports import Port
from jax_hetccl.rendezvous.member import Member


@dataclasses.dataclass(frozen=True)
class Equipment:
    """This process's ports, as it tells them to the others.

    Attributes:
      found: the ports.
    """

    found: discover.Found

    @classmethod
    def of(cls, config: Config) -> Equipment:
        """Looks at this machine, unless the settings leave no use for RDMA."""
        if config.tls:
            return cls(discover.Found(missing=choose.NOT_ENCRYPTED))
        if config.transport not in ("auto", "rdma"):
            return cls(discover.Found(missing=f"HETCCL_TRANSPORT={config.transport}"))
        return cls(discover.find(config.ib_hca, config.ib_gid_index))

    def record(self) -> dict[str, Any]:
        """What joining publishes."""
        return {"ports": [port.record() for port in self.found.ports], "missing": self.found.missing}

    def distances(self, count: int, gpus: Sequence[Gpu]) -> list[list[int]]:
        """For each of this process's devices, how far it is from each port.

        Args:
          count: the number of devices.
          gpus: their places, if they are GPUs and places are known.
        """
        if len(gpus) == count:
            places = [discover.place_of_pci(gpu.pci, gpu.numa) for gpu in gpus]
        else:
            places = [discover.place_of_process()] * count
        return [[int(d) for d in discover.distances(self.found.ports, place)] for place in places]


class Routes:
    """Ports of all ranks; the same in every process. Immutable."""

    def __init__(
        self, members: Sequence[Member], owner: Mapping[int, int], nics: Mapping[int, list[list[int]]]
    ) -> None:
        """Chooses.

        Args:
          members: all processes; their records hold the ports.
          owner: rank to member index.
          nics: by member index, the distances that it published, in the order of its ranks.
        """
        self.seats: dict[int, Seat] = {}
        self._ports = {m.index: tuple(map(Port.from_record, m.record["rdma"]["ports"])) for m in members}
        rows = {index: iter(distances) for index, distances in nics.items()}
        for rank, index in sorted(owner.items()):
            record = members[index].record
            distances = tuple(Distance(d) for d in next(rows[index]))
            host = record["boot"] or members[index].name
            self.seats[rank] = Seat(host, members[index].name, self._ports[index], distances, record["rdma"]["missing"])
        self.choices: dict[int, tuple[Choice, ...]] = choose.assign(self.seats)

    def ports(self, member: int) -> tuple[Port, ...]:
        """The ports of a process, in the order in which it published them."""
        return self._ports[member]

    def link(self, src: int, dst: int) -> Link | NoLink:
        """The ports that a message from rank `src` to rank `dst` takes."""
        return choose.link(self.seats[src], self.seats[dst], self.choices[src], self.choices[dst])
