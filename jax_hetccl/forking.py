"""A process that forks: the child has no part in the world, and must not keep it from ending.

Threads do not survive a fork, but descriptors do. While a child held the sockets of a process that died, no peer would see
their end. So the child lets go of them at once, and forgets the world without closing it: a goodbye is the parent's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Collection, Iterator
from typing import Any

from jax_hetccl._config import Config
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.door import coordinator_endpoint


def listening(config: Config, control: ControlPlane) -> frozenset[Any]:
    """Where the coordinator and all processes of a world listen, as `socket` writes addresses. Each socket of the world
    has such an address at one of its ends."""
    found: set[Any] = set()
    for endpoint in (coordinator_endpoint(config), *(member.record["control"] for member in control.members)):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        found.add((host.strip("[]"), int(port)))
    for member in control.members:
        if "data" in member.record:
            found |= {tuple(member.record["data"]), b"\0" + member.record["unix"].encode()}
    return frozenset(found)


def release(world: Any, listening: Collection[Any]) -> None:
    """Lets go, in the child, of what it has of its parent's world.

    Args:
      world: is never destroyed here: that would wait for threads that are not here, or speak in the parent's name.
      listening: see there.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(world))
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if any(end in listening for end in _ends(descriptor)):
            # Its number stays taken: whatever still knows it reaches nothing, and nobody else's file.
            os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)


def _ends(descriptor: int) -> Iterator[Any]:
    """The addresses of a socket's two ends; nothing for what is no socket."""
    try:
        copy = os.dup(descriptor)
    except OSError:  # the listed folder's own, closed by now
        return
    try:
        sock = socket.socket(fileno=copy)
    except OSError:  # no socket; Python leaves the copy open
        os.close(copy)
        return
    with sock:
        for ask in (sock.getsockname, sock.getpeername):
            with contextlib.suppress(OSError):
                address = ask()
                if isinstance(address, tuple):  # ZeroMQ's are of IPv6, and write IPv4 as a part of that
                    address = address[0].removeprefix("::ffff:"), address[1]
                yield address
