"""Where a member of a world to come can be reached."""

from __future__ import annotations

import os
import socket
from typing import Any

import zmq

from jax_hetccl._config import Config
from jax_hetccl.rendezvous import addresses, keys, sockets, zap
from jax_hetccl.rendezvous.coordinator import world_identity
from jax_hetccl.rendezvous.doorkeeper import Doorkeeper


class Door:
    """A listening socket with keys made for one world, which admits nobody until that world is known.

    Attributes:
      context: of the socket and of all others of the new world.
      keys: public and secret.
      holder: this process, for people.
      record: facts about this process for the others.
    """

    def __init__(self, config: Config, record: dict[str, Any]) -> None:
        """Listens on a free port; `record` gets the address and the public key."""
        self.context = zmq.Context()
        self.keys = zmq.curve_keypair()
        self.gate = zap.Gate(self.context)
        self.router = sockets.server(self.context, self.keys)
        self.doorkeeper = Doorkeeper(self.router, len(config.member_names))
        self.holder = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            address = addresses.local_address(config)
            port = sockets.bind_free(self.router, address, config.port_range)
        except BaseException:
            self.close()
            raise
        where = addresses.endpoint(address, port)
        self.record = {**record, "curve": self.keys[0], "control": where, "holder": self.holder}

    def close(self) -> None:
        """Closes it, with what a control plane that could not be made has left open; no thread may use that any more."""
        self.doorkeeper.close()
        self.router.close(0)
        self.gate.close()
        self.context.destroy(0)


def to_coordinator(context: zmq.Context, config: Config) -> zmq.Socket:
    """Returns an unconnected socket that speaks to the coordinator of `config` as its member."""
    pair = keys.curve_pair(config.secret, world_identity(config), config.member_name)
    return sockets.client(context, pair, keys.curve_pair(config.secret, "", keys.COORDINATOR)[0])


def coordinator_endpoint(config: Config) -> str:
    """Where to connect for it. Raises RendezvousError if its host cannot be resolved."""
    _, address = addresses.resolve_host(*config.coordinator)
    if not config.loopback and address.startswith("127."):
        address = addresses.local_address(config)  # see coordinator._bind_address
    return addresses.endpoint(address, config.coordinator[1])
