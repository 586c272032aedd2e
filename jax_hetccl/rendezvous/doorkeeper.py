"""Bounds for strangers at a ZeroMQ port, which ZeroMQ itself does not have.

libzmq accepts whoever connects and keeps the connection until the handshake's time is over, each for a descriptor and
some KB. It only tells of it: the socket's monitor has the descriptor of each connection. So the owner of the socket
counts those from which no message has come (only an admitted member's messages get that far) and, where they are too
many, shuts some down; libzmq then finds them ended.

A descriptor's number may belong to something else by the time one hears of it. Therefore it is first copied over one
that we own, which needs no free descriptor either, and the copy is looked at: it must be a connection to this port, and
the same one as before, by the kernel's cookie.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from typing import TypeVar

import zmq

from jax_hetccl.rendezvous.crowd import Crowd

# Connections without a message at one port; all members of a large world may come at once.
LEAST_PENDING = 128

Seen = TypeVar("Seen")

_SO_COOKIE = 57
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
_EVENT = struct.Struct("=Hi")
_BATCH = 1024


class Doorkeeper:
    """Watches the connections of one ROUTER. Used by the thread that owns the socket; owns `monitor`.

    Attributes:
      monitor: has something to read when `handle` has something to do.
    """

    def __init__(self, router: zmq.Socket, members: int) -> None:
        """Starts to watch.

        Args:
          router: not bound yet.
          members: how many processes may have business here.
        """
        self._router = router
        self._strangers: Crowd[int] = Crowd(max(LEAST_PENDING, 2 * members))
        self._cookies: dict[int, bytes] = {}  # of strangers and members, by descriptor
        self._port = 0  # known once the socket is bound
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        # Of a family whose addresses are the longest, or Python cuts the others' short.
        self._look = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, socket.socket().detach())
        where = f"inproc://hetccl.doorkeeper.{id(self)}"
        router.monitor(where, _EVENTS)
        self.monitor: zmq.Socket = router.context.socket(zmq.PAIR)
        self.monitor.linger = 0
        # No bound: libzmq's own thread would wait for room, with everything that it serves. It is as fast as accepting.
        self.monitor.rcvhwm = 0
        self.monitor.connect(where)

    def handle(self) -> None:
        """Takes note of connections that have come and gone; never blocks."""
        for _ in range(_BATCH):
            try:
                kind, fd = _EVENT.unpack(self.monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return
            if kind == zmq.EVENT_ACCEPTED:
                self._accepted(fd)
            else:
                self._cookies.pop(fd, None)
                self._strangers.discard(fd)

    def vouch(self, frame: zmq.Frame) -> None:
        """The connection that brought this frame of an admitted member is no stranger's."""
        fd = int(frame.get(zmq.SRCFD))
        if fd in self._strangers:
            self._strangers.discard(fd)
        elif fd not in self._cookies:  # its message was faster than the news of it
            cookie = self._look_at(fd, _cookie)
            if cookie is not None:
                self._cookies[fd] = cookie

    def close(self) -> None:
        """Stops watching; before the socket is closed."""
        self._router.disable_monitor()
        self.monitor.close(0)
        self._look.close()
        os.close(self._nothing)

    def _accepted(self, fd: int) -> None:
        if not self._port:
            self._port = int(self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
        seen = self._look_at(fd, lambda sock: (sock.getsockname()[1:2], sock.getpeername()[0], _cookie(sock)))
        if seen is None or seen[0] != (self._port,) or self._cookies.get(fd) == seen[2]:
            return  # it has ended, or a member's message was faster
        self._strangers.discard(fd)  # of another connection that had the number
        self._cookies[fd] = seen[2]
        victim = self._strangers.add(fd, seen[1])
        if victim is not None:
            self._shut(victim, self._cookies.pop(victim))

    def _shut(self, fd: int, cookie: bytes) -> None:
        self._look_at(fd, lambda sock: sock.shutdown(socket.SHUT_RDWR) if _cookie(sock) == cookie else None)

    def _look_at(self, fd: int, act: Callable[[socket.socket], Seen]) -> Seen | None:
        """Calls `act` with the socket that the descriptor stands for; None if that has ended or is no socket."""
        try:
            os.dup2(fd, self._look.fileno(), inheritable=False)
            return act(self._look)
        except OSError:
            return None
        finally:
            os.dup2(self._nothing, self._look.fileno(), inheritable=False)


def _cookie(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)
