"""Who the members of a world are, and what joining hands over to the control plane."""

from __future__ import annotations

import dataclasses
from typing import Any

import zmq

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
