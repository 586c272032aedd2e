"""Admission of CURVE clients (ZeroMQ's ZAP protocol, RFC 27), answered in the owner's own poll loop.

libzmq asks about every client that finished its CURVE handshake and waits for the answer. We admit a
client only if its public key is in a table, and the table's name for that key becomes the "User-Id"
of all its messages: what a client claims about itself is never trusted.
"""

from __future__ import annotations

from collections.abc import Mapping

import zmq
from zmq.utils import z85


class Gate:
    """Answers admission requests of one `zmq.Context`. Used by one thread; owns `socket`.

    Until `handle` is called requests simply wait (up to libzmq's handshake interval), so an owner
    that does not know the admissible keys yet may poll later.
    """

    def __init__(self, context: zmq.Context, admitted: Mapping[bytes, str] | None = None) -> None:
        """Starts to receive the requests of `context`. `admitted` maps a public key (Z85) to a name."""
        self.admitted: dict[bytes, str] = dict(admitted or {})
        self.refused: dict[str, int] = {}
        self.socket: zmq.Socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def handle(self) -> None:
        """Answers all waiting requests; never blocks."""
        while self.socket.poll(0):
            version, request, _domain, address, _routing, mechanism, *credentials = self.socket.recv_multipart()
            name = None
            if mechanism == b"CURVE" and len(credentials) == 1:
                name = self.admitted.get(z85.encode(credentials[0]))
            if name is None:
                peer = address.decode(errors="replace")
                if len(self.refused) < 64:  # bounded: strangers must not grow it
                    self.refused[peer] = self.refused.get(peer, 0) + 1
            status = (b"200", b"OK", name.encode()) if name is not None else (b"400", b"unknown key", b"")
            self.socket.send_multipart([version, request, *status, b""])

    def close(self) -> None:
        """Stops answering: libzmq refuses later clients of sockets that enforce their domain (see `sockets.server`)."""
        self.socket.close(0)
