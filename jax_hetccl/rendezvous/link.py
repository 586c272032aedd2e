"""One member's outgoing, reliable, ordered message stream to another member.

ZeroMQ reconnects by itself but loses what was under way when a connection broke. So messages are
numbered, kept until acknowledged, and sent again after a reconnection; the receiver takes only the
next number. All methods run on the control thread.
"""

from __future__ import annotations

import collections
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from jax_hetccl.rendezvous import messages

# A process that closed its connection and does not accept a new one for this long is gone. Long
# enough for a reconnection after a network error, short beside a training step's timeout.
LOST_AFTER = 0.8
# The same after a silence: the connection has broken because nothing was acknowledged for seconds.
_SILENCE = 2.0
_LOST_AFTER_SILENCE = 0.4
# How often a byte must be under way, so that a link that is gone is noticed by what is not acknowledged (`sockets`).
# A stopped process lets them pile up: some 50 bytes each, more than ten minutes of them fit into its socket.
BEAT = 0.5
_GIVE_UP_AFTER = 0.3

_BEAT = messages.pack("BEAT")

_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Link:
    """Messages to one member, and what is known about it. Owns the DEALER and its monitor."""

    def __init__(self, dealer: zmq.Socket, endpoint: str) -> None:
        """Starts connecting `dealer` to `endpoint`."""
        self.dealer = dealer
        self.monitor: zmq.Socket = dealer.get_monitor_socket(_EVENTS)
        self.endpoint = endpoint
        self.departed = False
        self.lost = False
        self.received = 0  # number of the last message taken from this member
        self._sent = 0
        self._kept: collections.deque[tuple[int, bytes]] = collections.deque()  # number and message
        self._pieces: list[bytes] = []  # of the payload that is being received
        self._connections = 0
        self._down_since: float | None = None
        self._heard = time.monotonic()
        self._grace = LOST_AFTER
        dealer.connect(endpoint)

    @property
    def ever_connected(self) -> bool:
        """Whether a handshake has succeeded at least once."""
        return self._connections > 0

    @property
    def settled(self) -> bool:
        """True if nothing more can or need be delivered; for closing, where a broken connection soon counts."""
        return self.departed or self.lost or not self._kept or self.down_for() > _GIVE_UP_AFTER

    def send(self, payload: bytes) -> None:
        """Sends `payload` reliably."""
        if self.departed or self.lost:
            return
        size = messages.PIECE_BYTES
        for at in range(0, max(len(payload), 1), size):
            self._sent += 1
            data = messages.pack("DATA", self._sent, payload[at : at + size], at + size >= len(payload))
            self._kept.append((self._sent, data))
            self._transmit(data)

    def take(self, number: int, piece: bytes, last: bool) -> bytes | None:
        """Takes a piece of what the member sends, if it is the next one.

        Returns:
          The whole payload, if it is complete now.

        Raises:
          ValueError: it is no piece of a payload, or the payload grows without end.
        """
        if not isinstance(piece, bytes) or len(piece) > messages.PIECE_BYTES:
            raise ValueError("not a piece of a payload")
        if number != self.received + 1:  # a repetition, or its predecessor was lost
            return None
        if len(self._pieces) >= messages.MAX_BYTES // messages.PIECE_BYTES:
            raise ValueError(f"a payload of more than {messages.MAX_BYTES} bytes")
        self.received += 1
        self._pieces.append(piece)
        if not last:
            return None
        payload = b"".join(self._pieces)
        self._pieces.clear()
        return payload

    def beat(self) -> None:
        """Sends a heartbeat, which asks for nothing but the kernel's acknowledgement."""
        if not self.departed and not self.lost and self.down_for() == 0:
            self._transmit(_BEAT)

    def heard(self) -> None:
        """Something has come from this member."""
        self._heard = time.monotonic()

    def acknowledge(self) -> None:
        """Tells the member what we have taken from it."""
        self._transmit(messages.pack("ACK", self.received))

    def acknowledged(self, number: int) -> None:
        """The member has taken everything up to `number`."""
        while self._kept and self._kept[0][0] <= number:
            self._kept.popleft()

    def handle_monitor(self) -> None:
        """Follows connections and disconnections; repeats what a broken connection may have lost."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                if self._down_since is None and self.ever_connected:
                    self._down_since = now = time.monotonic()
                    self._grace = _LOST_AFTER_SILENCE if now - self._heard > _SILENCE else LOST_AFTER
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._down_since = None
                self._connections += 1
                # Whoever has said nothing yet counts as a stranger there (see `doorkeeper`).
                self.acknowledge()
                if self._connections > 1:
                    for _, data in self._kept:
                        self._transmit(data)

    def down_for(self) -> float:
        """Seconds since the connection broke; 0 while it stands or before it ever stood."""
        since = self._down_since  # other threads ask too
        return 0.0 if since is None else time.monotonic() - since

    @property
    def overdue(self) -> bool:
        """Whether the connection has been down for too long."""
        return self.down_for() >= self._grace

    def close(self, linger_ms: int) -> None:
        """Closes the sockets, giving the last messages `linger_ms` to leave."""
        self.dealer.disable_monitor()
        self.monitor.close(0)
        self.dealer.close(linger_ms)

    def _transmit(self, data: bytes) -> None:
        try:
            self.dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:  # the queue is full: the connection is down; kept messages are repeated
            pass
