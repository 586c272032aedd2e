"""Opening data channels to other processes: choosing a transport, connecting, authenticating.

The sending side opens a channel. What comes out are plain file descriptors for the native engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from jax_hetccl._config import Config, is_loopback
from jax_hetccl._errors import RendezvousError
from jax_hetccl.rendezvous import addresses, handshake
from jax_hetccl.rendezvous.acceptor import FDS_BYTE
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.handshake import Claim
from jax_hetccl.rendezvous.member import Member

_log = logging.getLogger(__name__)

# The peer's accept thread may have to wait for the peer's GIL while it traces or compiles.
DIAL_S = 60.0

# One TCP stream is bound by one core's copying on a path without a wire, where two beat one; on a
# real network one stream with the kernel's own tuning fills the link and more of them compete.
LOOPBACK_STRIPES = 2
NETWORK_STRIPES = 1


def listeners(config: Config) -> tuple[list[socket.socket], dict[str, Any]]:
    """Returns this process's listening sockets and what the others must know to reach them."""
    address = addresses.local_address(config)
    tcp = addresses.listen_tcp(address, config.port_range)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    # An abstract name: nothing in the file system to protect or to leave behind.
    name = f"hetccl-{os.getpid()}-{secrets.token_hex(8)}"
    unix.bind("\0" + name)
    unix.listen(128)
    record = {"data": [address, tcp.getsockname()[1]], "unix": name, "boot": boot_id(), "uid": os.getuid()}
    return [tcp, unix], record


def boot_id() -> str:
    """Identifies this running kernel; empty if it does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


class Opener:
    """Opens outgoing channels. Thread-safe."""

    def __init__(self, config: Config, control: ControlPlane) -> None:
        """`control` tells who the members are and which keys they share with us."""
        self._config = config
        self._control = control
        self._no_shm: set[int] = set()

    def open(
        self, member: Member, src: int, dst: int, make_segment: Callable[[], list[int]] | None = None
    ) -> tuple[str, list[int]]:
        """Opens the channel `src` -> `dst` to `member`.

        Args:
          member: the process that owns rank `dst`.
          src: a rank of this process.
          dst: the peer's rank.
          make_segment: makes the shared memory of a shm channel; returns its descriptors, which the peer
            gets too. None where there is no such transport.

        Returns:
          The transport's name and the descriptors for the engine, whose owner is now the caller.

        Raises:
          RendezvousError: the peer cannot be reached or does not prove who it is.
        """
        wanted = self._config.transport
        if wanted != "tcp" and make_segment and self._shm_possible(member):
            try:
                return "shm", self._open_shm(member, src, dst, make_segment)
            except (OSError, RuntimeError) as error:  # e.g. no memory left, or another network namespace
                if wanted == "shm":
                    raise RendezvousError(
                        f"HETCCL_TRANSPORT=shm, but {member.name} cannot be reached over shared memory: {error}"
                    ) from None
                if member.index not in self._no_shm:
                    self._no_shm.add(member.index)
                    _log.warning("no shared memory with %s (%s): using tcp", member.name, error)
        elif wanted == "shm":
            raise RendezvousError(
                f"HETCCL_TRANSPORT=shm, but {member.name} runs on another host or as another user; use auto or tcp"
            )
        return "tcp", self._open_tcp(member, src, dst)

    def _shm_possible(self, member: Member) -> bool:
        if member.index in self._no_shm:
            return False
        same_host = member.record.get("boot") == boot_id() != ""
        return same_host and member.record.get("uid") == os.getuid()

    def _claim(
        self, member: Member, src: int, dst: int, stripe: int, stripes: int, transport: str, attempt: bytes
    ) -> Claim:
        return Claim(self._control.me, member.index, src, dst, stripe, stripes, transport, attempt)

    def _open_tcp(self, member: Member, src: int, dst: int) -> list[int]:
        address, port = member.record["data"]
        mine = self._control.members[self._control.me].record["data"][0]
        stripes = LOOPBACK_STRIPES if is_loopback(address) or address == mine else NETWORK_STRIPES
        attempt = os.urandom(8)
        socks: list[socket.socket] = []
        try:
            for stripe in range(stripes):
                sock = self._connect(member, address, port)
                socks.append(sock)
                self._prove(sock, member, self._claim(member, src, dst, stripe, stripes, "tcp", attempt))
        except BaseException:
            for sock in socks:
                sock.close()
            raise
        return [sock.detach() for sock in socks]

    def _connect(self, member: Member, address: str, port: int) -> socket.socket:
        try:
            sock = socket.create_connection((address, port), timeout=DIAL_S)
        except OSError as error:
            raise RendezvousError(
                f"cannot open a channel to {member.name} at {address} port {port}: {error}; is it still running, "
                "and do firewalls let this port through (HETCCL_PORT_RANGE fixes it)?"
            ) from None
        addresses.set_keepalive(sock)
        return sock

    def _open_shm(self, member: Member, src: int, dst: int, make_segment: Callable[[], list[int]]) -> list[int]:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            sock.settimeout(DIAL_S)
            sock.connect("\0" + member.record["unix"])
            self._prove(sock, member, self._claim(member, src, dst, 0, 1, "shm", os.urandom(8)))
            segment = make_segment()
            undo.callback(lambda: [os.close(fd) for fd in segment])
            socket.send_fds(sock, [FDS_BYTE], segment)
            if _read(sock, 1, time.monotonic() + DIAL_S) != FDS_BYTE:
                raise RendezvousError(f"{member.name} did not take the shared memory")
            sock.settimeout(None)
            undo.pop_all()
            return [sock.detach(), *segment]

    def _prove(self, sock: socket.socket, member: Member, claim: Claim) -> None:
        dialer = handshake.Dialer(self._control.pair_key(member.index), claim)
        deadline = time.monotonic() + DIAL_S
        what = f"the channel of ranks {claim.src} to {claim.dst} to {member.name}"
        try:
            sock.sendall(dialer.hello())
            sock.sendall(dialer.proof(_read(sock, handshake.ANSWER_BYTES, deadline)))
            proof = _read(sock, handshake.PROOF_BYTES, deadline)
        except TimeoutError:
            raise RendezvousError(f"{what}: no answer in {DIAL_S:.0f} s") from None
        except OSError as error:
            raise RendezvousError(f"{what} was refused ({error}); its log says why") from None
        if not dialer.check(proof):
            raise RendezvousError(f"{what}: whoever answered is not {member.name}")
        sock.settimeout(None)


def _read(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        sock.settimeout(left)
        chunk = sock.recv(count - len(data))
        if not chunk:
            raise ConnectionError("it closed the connection")
        data += chunk
    return data
