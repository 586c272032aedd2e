"""Who the members of a world are, and what joining hands over to the control plane."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import zmq

from jax_hetccl._config import Config
from jax_hetccl.rendezvous import coordinator as coordinator_
from jax_hetccl.rendezvous import zap
from jax_hetccl.rendezvous.doorkeeper import Doorkeeper


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of the world. `record` is what it told the coordinator about itself."""

    index: int
    cluster: int
    cluster_name: str
    process: int
    record: dict[str, Any]

    @property
    def name(self) -> str:
        """The member as `cluster/process`."""
        return f"{self.cluster_name}/{self.process}"


def members_of(config: Config, directory: Sequence[Sequence[Any]]) -> tuple[Member, ...]:
    """The members of a world, in the order of the job's clusters.

    Args:
      config: settings of a process of the job.
      directory: name and record of every member; whole clusters, not all of the job's maybe.
    """
    records = {str(name): record for name, record in directory}
    there = [(name, count) for name, count in config.clusters if f"{name}/0" in records]
    members: list[Member] = []
    for cluster, (name, count) in enumerate(there):
        for process in range(count):
            members.append(Member(len(members), cluster, name, process, records[f"{name}/{process}"]))
    return tuple(members)


def narrowed(job: Config, members: Sequence[Member]) -> Config:
    """The settings of this process in a world of these members.

    Args:
      job: the settings that it was started with.
      members: of the world, this process among them.

    Returns:
      `job` itself for a world of all clusters. Otherwise without the sizes of axes, which hold for all clusters only.
    """
    names = {member.cluster_name for member in members}
    clusters = tuple((name, count) for name, count in job.clusters if name in names)
    if clusters == job.clusters:
        return job
    place = [name for name, _ in clusters].index(job.cluster_name)
    return dataclasses.replace(job, clusters=clusters, cluster=place, axes=dict.fromkeys(job.axes))


@dataclasses.dataclass
class Joined:
    """What `join.join` hands over: sockets (not used by any thread any more) and the world's facts."""

    context: zmq.Context
    router: zmq.Socket
    gate: zap.Gate
    doorkeeper: Doorkeeper
    keys: tuple[bytes, bytes]
    nonce: bytes
    members: tuple[Member, ...]
    me: int
    to_coordinator: zmq.Socket
    instance: bytes
    holder: str
    hosted: coordinator_.Coordinator | None
