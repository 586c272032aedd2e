"""A TCP port for a world that lives on this machine."""

from __future__ import annotations

import socket

_held: list[socket.socket] = []


def reserve_port() -> int:
    """A loopback port for a listener with SO_REUSEADDR, as ZeroMQ's are, in another process.

    Nothing else gets the port while this process lives: it stays bound here, without listening. Choosing a port that is
    merely free would leave it to whoever binds or connects next, and a world takes seconds to start.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _held.append(holder)
    return holder.getsockname()[1]
