"""Setting up incoming channels that block while they do so: the threads "hetccl-setup".

Both ends of an rdma channel try their queue pairs over its stream, for seconds if they do not work, and both ends of TLS
wait for each other. On the accept thread one such peer would keep all others waiting, and they would take that for queue
pairs that do not work.

These threads wait for the dialing thread of another process, which waits for a thread like these there, never for one
that dials: two processes that open channels to each other at once do not wait in a circle. A set-up begins with the last
message of the handshake. For RDMA it is sent here: until it comes, a dialer has the long patience of the handshake, however
many are before it; only then it counts the seconds of a queue pair that does not answer. For TLS it has been sent before: a
dialer counts from then on, also while others are before it, and has 60 s.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)

# They mostly wait. Peers that do not answer hold one each for seconds; the others need the rest.
THREADS = 16


class Setups:
    """Sets up channels, many at a time. Owns their sockets until then."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, "hetccl-setup")
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()

    def start(self, socks: Sequence[socket.socket], act: Callable[[list[int]], None], greeting: bytes = b"") -> None:
        """Sends `greeting`, then calls `act` with descriptors of `socks`, which it then owns. Returns at once.

        Args:
          socks: the channel's streams; now belong to this object.
          act: sets up the channel; may block.
          greeting: the last message of the handshake of an rdma channel, on its only stream.
        """
        with self._lock:
            self._sockets.update(socks)
        future = self._pool.submit(self._set_up, socks, greeting, act)
        future.add_done_callback(lambda _: self._forget(socks))  # also if it is cancelled

    def close(self) -> None:
        """Ends the streams of what is being set up; does not wait until that has noticed (`join`)."""
        with self._lock:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Waits for what `close` ended. What is set up may also wait for the engine, so close that first."""
        self._pool.shutdown()

    def _set_up(self, socks: Sequence[socket.socket], greeting: bytes, act: Callable[[list[int]], None]) -> None:
        try:
            if greeting:
                socks[0].sendall(greeting)
            # Copies, so that `close` can end the streams while `act` waits on them.
            copies = [sock.dup() for sock in socks]
            act([copy.detach() for copy in copies])
        except OSError as error:
            _log.debug("a connection was dropped: %s", error)
        except Exception:
            _log.exception("a channel could not be set up")

    def _forget(self, socks: Sequence[socket.socket]) -> None:
        with self._lock:
            self._sockets.difference_update(socks)
        for sock in socks:
            sock.close()
