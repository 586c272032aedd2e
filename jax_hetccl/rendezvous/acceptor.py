"""Takes incoming data channels: the thread "hetccl-accept".

Strangers may connect, so until a connection is authenticated it costs us one descriptor, at most
`HELLO_BYTES + PROOF_BYTES` bytes of reading and `HANDSHAKE_S` seconds, and there are at most
`MAX_PENDING` such connections: a newer one displaces the oldest of the address that has most. Nothing
blocks: one slow peer does not hold up the others.
What does block, the setting up of RDMA and of TLS, runs on other threads (`setups`).
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import errno
import functools
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence

from jax_hetccl.rendezvous import addresses, handshake
from jax_hetccl.rendezvous.crowd import Crowd
from jax_hetccl.rendezvous.handshake import Claim
from jax_hetccl.rendezvous.setups import Setups

_log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
MAX_PENDING = 128
MAX_STRIPES = 16
# Stripes of one channel come within one handshake of each other.
_GROUP_S = 30.0
_POLL_S = 0.5
# A shm channel comes with the memory of its segment and nothing else.
SHM_FDS = 1

# The dialer of a shm channel sends its descriptors with this byte and gets it back when they are here.
FDS_BYTE = b"F"
_SCM_RIGHTS = (socket.SOL_SOCKET, socket.SCM_RIGHTS)


@dataclasses.dataclass
class _Pending:
    """A connection that is not a channel yet."""

    sock: socket.socket
    since: float
    need: int = handshake.HELLO_BYTES
    data: bytes = b""
    exchange: handshake.Acceptor | None = None
    claim: Claim | None = None
    key: bytes = b""  # for what follows on the connection


@dataclasses.dataclass
class _Group:
    """The stripes of one channel that have come so far."""

    since: float
    stripes: dict[int, tuple[socket.socket, bytes]] = dataclasses.field(default_factory=dict)  # with their keys


class AcceptorHooks:
    """What an `Acceptor` asks its owner, on the thread "hetccl-accept" unless noted."""

    def key(self, member: int) -> bytes | None:
        """The key shared with `member`, or None if there is no such member."""
        raise NotImplementedError

    def refusal(self, claim: Claim) -> str | None:
        """Why an authenticated channel is refused, or None."""
        raise NotImplementedError

    def blocks(self, claim: Claim) -> bool:
        """Whether `opened` waits for the dialer; for rdma it does anyway."""
        raise NotImplementedError

    def opened(self, claim: Claim, fds: list[int], keys: Sequence[bytes]) -> None:
        """A channel is complete; takes ownership of `fds`.

        On a thread "hetccl-setup" for rdma and if this `blocks`. `keys` are those of tcp connections, for TLS.
        """
        raise NotImplementedError


class Acceptor:
    """Owns the listening sockets and the connections that are not channels yet.

    The sockets listen from before the join; the thread starts with `start`, and until then dialers
    wait in the backlog.
    """

    def __init__(self, listeners: list[socket.socket]) -> None:
        """Takes ownership of `listeners`."""
        self._listeners = listeners
        self._hooks: AcceptorHooks | None = None
        self._pending: dict[socket.socket, _Pending] = {}
        self._strangers: Crowd[socket.socket] = Crowd(MAX_PENDING)
        self._groups: dict[tuple[int, int, int, int, bytes], _Group] = {}
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = False
        self._scarce = False  # said so
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="hetccl-accept", daemon=True)
        self._setups = Setups()

    def start(self, hooks: AcceptorHooks) -> None:
        """Starts to take connections."""
        self._hooks = hooks
        self._thread.start()

    def close(self) -> None:
        """Stops listening and drops connections that are not channels yet, also those whose RDMA is being set up.

        Idempotent, thread-safe, bounded.
        """
        with self._closing:
            if self._stop:
                return
            self._stop = True
            if self._thread.ident is None:  # never started
                self._tear_down()
            else:
                os.eventfd_write(self._wake, 1)
                self._thread.join(5)
            if not self._thread.is_alive():  # nobody else closes it, so the write above never meets a stranger's
                os.close(self._wake)
            self._setups.close()

    def join(self) -> None:
        """Waits for the set-ups that `close` ended; once the engine is closed, for which they may wait."""
        self._setups.join()

    # --- the accept thread -------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        try:
            while not self._stop:
                for key, _ in self._selector.select(_POLL_S):
                    if key.fileobj in self._listeners:
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                    elif key.fileobj in self._pending:
                        self._step(self._pending[key.fileobj])  # type: ignore[index]
                self._expire()
        except Exception:
            _log.exception("the accept thread failed: no further channels can be opened to this process")
        finally:
            self._tear_down()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(64):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    if not self._scarce:
                        _log.warning("an incoming channel waits: %s; raise `ulimit -n` or free memory", error)
                    self._scarce = True
                    victim = self._strangers.oust()
                    if victim is not None:
                        self._drop(victim)
                    else:
                        time.sleep(0.05)  # the backlog keeps them until descriptors are free again
                return
            try:
                sock.setblocking(False)
                if sock.family == socket.AF_UNIX:
                    source = f"user {_user(sock)}"
                else:
                    source = str(address[0])
                    addresses.set_keepalive(sock)
            except OSError as error:
                _log.debug("a connection was dropped: %s", error)
                sock.close()
                continue
            self._pending[sock] = _Pending(sock, time.monotonic())
            self._selector.register(sock, selectors.EVENT_READ)
            victim = self._strangers.add(sock, source)
            if victim is not None:
                self._drop(victim)

    def _step(self, pending: _Pending) -> None:
        """Reads what the current message still needs, never more, and acts when it is complete."""
        try:
            if pending.claim and pending.need == 0:
                self._take_fds(pending)
                return
            chunk = pending.sock.recv(pending.need - len(pending.data))
            if not chunk:
                self._drop(pending.sock)
                return
            pending.data += chunk
            if len(pending.data) == pending.need:
                message, pending.data = pending.data, b""
                self._advance(pending, message)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            _log.debug("a connection was dropped: %s", error)
            self._drop(pending.sock)
        except Exception:  # whatever one connection brings about, the others are served
            _log.exception("a connection was dropped")
            self._drop(pending.sock)

    def _advance(self, pending: _Pending, message: bytes) -> None:
        assert self._hooks
        if pending.exchange is None:
            pending.exchange = handshake.Acceptor(message)
            pending.need = handshake.PROOF_BYTES
            self._send(pending.sock, pending.exchange.answer())
            return
        # An unknown member fails like a wrong proof does: with a key that nobody has.
        key = self._hooks.key(pending.exchange.dialer) or os.urandom(32)
        claim = pending.exchange.check(key, message)
        if claim is None:
            raise ValueError("the proof is wrong")
        why = self._hooks.refusal(claim)
        if not 0 < claim.stripes <= MAX_STRIPES or claim.stripe >= claim.stripes:
            why = f"stripe {claim.stripe} of {claim.stripes}"
        if why:
            _log.warning("channel of ranks %d to %d refused: %s", claim.src, claim.dst, why)
            raise ValueError(why)
        if claim.transport == "rdma":
            self._selector.unregister(pending.sock)
            del self._pending[pending.sock]
            self._strangers.discard(pending.sock)
            act = functools.partial(self._hooks.opened, claim, keys=())
            self._setups.start([pending.sock], act, pending.exchange.proof(key))
            return
        self._send(pending.sock, pending.exchange.proof(key))
        pending.claim, pending.key = claim, pending.exchange.stream_key(key)
        if claim.transport == "shm":
            pending.need = 0
        else:
            self._complete(pending, [])

    def _take_fds(self, pending: _Pending) -> None:
        # Not socket.recv_fds: it ignores its flags, and without CLOEXEC children would keep the memory.
        space = socket.CMSG_LEN(SHM_FDS * array.array("i").itemsize)
        data, ancillary, flags, _ = pending.sock.recvmsg(1, space, socket.MSG_CMSG_CLOEXEC)
        fds = [fd for level, kind, raw in ancillary if (level, kind) == _SCM_RIGHTS for fd in array.array("i", raw)]
        if data != FDS_BYTE or len(fds) != SHM_FDS or flags & socket.MSG_CTRUNC:
            for fd in fds:
                os.close(fd)
            raise ValueError(f"expected {SHM_FDS} descriptor")
        self._send(pending.sock, FDS_BYTE)
        self._complete(pending, fds)

    def _complete(self, pending: _Pending, extra: list[int]) -> None:
        assert self._hooks and pending.claim
        claim, sock = pending.claim, pending.sock
        self._selector.unregister(sock)
        del self._pending[sock]
        self._strangers.discard(sock)
        key = (claim.dialer, claim.src, claim.dst, claim.stripes, claim.attempt)
        group = self._groups.setdefault(key, _Group(time.monotonic()))
        group.stripes[claim.stripe] = sock, pending.key
        if len(group.stripes) < claim.stripes:
            return
        del self._groups[key]
        socks, keys = zip(*(group.stripes[stripe] for stripe in range(claim.stripes)), strict=True)
        if self._hooks.blocks(claim):
            self._setups.start(socks, functools.partial(self._hooks.opened, claim, keys=keys))
            return
        try:
            self._hooks.opened(claim, [sock.detach() for sock in socks] + extra, keys)
        except Exception:
            _log.exception("channel of ranks %d to %d could not be opened", claim.src, claim.dst)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        if sock.send(data) != len(data):  # a fresh socket's buffer is empty; whoever filled it is no peer
            raise ValueError("short write")

    def _expire(self) -> None:
        now = time.monotonic()
        for pending in [p for p in self._pending.values() if now - p.since > HANDSHAKE_S]:
            self._drop(pending.sock)
        for key, group in list(self._groups.items()):
            if now - group.since > _GROUP_S:
                del self._groups[key]
                for sock, _ in group.stripes.values():
                    sock.close()

    def _drop(self, sock: socket.socket) -> None:
        self._pending.pop(sock, None)
        self._strangers.discard(sock)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)
        sock.close()

    def _tear_down(self) -> None:
        for sock in list(self._pending):
            self._drop(sock)
        for group in self._groups.values():
            for sock, _ in group.stripes.values():
                sock.close()
        self._groups.clear()
        for listener in self._listeners:
            listener.close()
        self._selector.close()


def _user(sock: socket.socket) -> int:
    """Whose process is at the other end of a unix socket."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return uid
