"""Opening data channels to other processes: choosing a transport, connecting, authenticating.

The sending side opens a channel. What comes out are plain file descriptors for the native engine.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax_hetccl._config import Config, is_loopback
from jax_hetccl._errors import RendezvousError
from jax_hetccl._host import boot_id
from jax_hetccl.rdma import choose
from jax_hetccl.rdma.choose import Link, NoLink
from jax_hetccl.rendezvous import addresses, handshake
from jax_hetccl.rendezvous.acceptor import FDS_BYTE
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.handshake import Claim
from jax_hetccl.rendezvous.member import Member

_log = logging.getLogger(__name__)

# The peer's accept thread may have to wait for the peer's GIL while it traces or compiles.
DIAL_S = 60.0
# How often it looks whether the control plane knows that the peer is gone.
_LOOK_S = 0.25

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


class Opened(NamedTuple):
    """A connected, authenticated channel that the engine does not have yet.

    Attributes:
      transport: its name.
      fds: descriptors for the engine; whoever gets this owns them.
      link: the two ports of an rdma channel.
      keys: of a tcp channel, for TLS on each of its connections.
    """

    transport: str
    fds: list[int]
    link: Link | None = None
    keys: Sequence[bytes] = ()


class Opener:
    """Opens outgoing channels. Thread-safe."""

    def __init__(
        self,
        config: Config,
        control: ControlPlane,
        link: Callable[[int, int], Link | NoLink] = lambda src, dst: NoLink("no ports are known", False),
    ) -> None:
        """`control` tells who the members are and which keys they share with us, `link` which ports two ranks have."""
        self._config = config
        self._control = control
        self._link = link
        self._no_shm: set[int] = set()
        self._no_rdma: dict[tuple[int, str, str], str] = {}  # member and both ports: why they do not work
        self._told: set[int] = set()
        self._lock = threading.Lock()

    def open(self, member: Member, src: int, dst: int, make_segment: Callable[[], list[int]] | None = None) -> Opened:
        """Opens the channel `src` -> `dst` to `member`, over the best transport that is not known to fail.

        Args:
          member: the process that owns rank `dst`.
          src: a rank of this process.
          dst: the peer's rank.
          make_segment: makes the shared memory of a shm channel; returns its descriptors, which the peer
            gets too. None where there is no such transport.

        Raises:
          RendezvousError: the peer cannot be reached or does not prove who it is; or HETCCL_TRANSPORT forces a transport
            that this pair cannot use.
        """
        wanted = self._config.transport
        no_shm = self._no_shm_with(member) if make_segment else "there is no shared memory"
        link = self._link(src, dst)
        no_rdma = link.why if isinstance(link, NoLink) else self._no_rdma.get(_key(member, link), "")
        for transport in choose.attempts(wanted, no_shm, no_rdma):
            if transport == "shm":
                if no_shm:
                    raise RendezvousError(f"HETCCL_TRANSPORT=shm, but {member.name} {no_shm}; use auto, rdma or tcp")
                assert make_segment
                try:
                    return Opened("shm", self._open_shm(member, src, dst, make_segment))
                except (OSError, RuntimeError) as error:  # e.g. no memory left, or another network namespace
                    if wanted == "shm":
                        raise RendezvousError(
                            f"HETCCL_TRANSPORT=shm, but {member.name} cannot be reached over shared memory: {error}"
                        ) from None
                    if member.index not in self._no_shm:
                        self._no_shm.add(member.index)
                        _log.warning("no shared memory with %s (%s): using another transport", member.name, error)
            elif transport == "rdma":
                if isinstance(link, NoLink):
                    raise RendezvousError(
                        f"HETCCL_TRANSPORT=rdma, but {self._me} and {member.name} have no ports for it: {link.why}; "
                        "`hetccl topo` shows the ports of a machine"
                    )
                return Opened("rdma", self._open_rdma(member, src, dst, link), link)
        if wanted == "auto" and isinstance(link, NoLink):
            self._tell(member, link.why, logging.WARNING if link.surprising else logging.DEBUG)
        return self._open_tcp(member, src, dst)

    def rdma_failed(self, member: Member, link: Link, error: Exception) -> None:
        """Takes note that two ports do not work together, so that `open` uses tcp; says so once for each member.

        Raises:
          RendezvousError: HETCCL_TRANSPORT=rdma leaves no other transport.
        """
        why = str(error).removeprefix("hetccl: ")
        if self._config.transport == "rdma":
            raise RendezvousError(
                f"HETCCL_TRANSPORT=rdma, but {link.mine.port.name} of {self._me} and {link.theirs.port.name} of "
                f"{member.name} do not work together: {why}"
            ) from None
        with self._lock:
            self._no_rdma[_key(member, link)] = why
        self._tell(member, f"{link.mine.port.name} here, {link.theirs.port.name} there: {why}", logging.WARNING)

    def _tell(self, member: Member, why: str, level: int) -> None:
        with self._lock:
            first = member.index not in self._told
            self._told.add(member.index)
        if first:
            _log.log(level, "no rdma between %s and %s (%s): using tcp", self._me, member.name, why)

    @property
    def _me(self) -> str:
        return self._control.members[self._control.me].name

    def _no_shm_with(self, member: Member) -> str:
        if member.index in self._no_shm:
            return "cannot be reached over shared memory"
        same_host = member.record.get("boot") == boot_id() != ""
        return (
            "" if same_host and member.record.get("uid") == os.getuid() else "runs on another host or as another user"
        )

    def _claim(
        self, member: Member, src: int, dst: int, transport: str, stripe: int = 0, stripes: int = 1, **more: Any
    ) -> Claim:
        return Claim(self._control.me, member.index, src, dst, stripe, stripes, transport, **more)

    def _open_tcp(self, member: Member, src: int, dst: int) -> Opened:
        address, port = member.record["data"]
        mine = self._control.members[self._control.me].record["data"][0]
        stripes = LOOPBACK_STRIPES if is_loopback(address) or address == mine else NETWORK_STRIPES
        attempt = os.urandom(8)
        socks: list[socket.socket] = []
        keys: list[bytes] = []
        try:
            for stripe in range(stripes):
                sock = self._connect(member, address, port)
                socks.append(sock)
                claim = self._claim(member, src, dst, "tcp", stripe, stripes, attempt=attempt)
                keys.append(self._prove(sock, member, claim))
        except BaseException:
            for sock in socks:
                sock.close()
            raise
        return Opened("tcp", [sock.detach() for sock in socks], keys=keys)

    def _open_rdma(self, member: Member, src: int, dst: int, link: Link) -> list[int]:
        """A stream over which the two ends set up their queue pairs, and which ends when one of them does."""
        sock = self._connect(member, *member.record["data"])
        try:
            claim = self._claim(member, src, dst, "rdma", attempt=os.urandom(8), port=link.theirs.index)
            self._prove(sock, member, claim)
        except BaseException:
            sock.close()
            raise
        return [sock.detach()]

    def _connect(self, member: Member, address: str, port: int) -> socket.socket:
        try:
            sock = _connected(address, port, self._gone(member))
        except OSError as error:
            raise RendezvousError(
                f"cannot open a channel to {member.name} at {address} port {port}: {error}; is it still running, "
                "and do firewalls let this port through (HETCCL_PORT_RANGE fixes it)?"
            ) from None
        addresses.set_keepalive(sock)
        return sock

    def _gone(self, member: Member) -> Callable[[], bool]:
        """Whether there is no use in waiting for `member` any longer."""
        return lambda: self._control.state_of(member.index) != "present"

    def _open_shm(self, member: Member, src: int, dst: int, make_segment: Callable[[], list[int]]) -> list[int]:
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            sock.settimeout(DIAL_S)
            sock.connect("\0" + member.record["unix"])
            self._prove(sock, member, self._claim(member, src, dst, "shm", attempt=os.urandom(8)))
            segment = make_segment()
            undo.callback(lambda: [os.close(fd) for fd in segment])
            socket.send_fds(sock, [FDS_BYTE], segment)
            if _read(sock, 1, time.monotonic() + DIAL_S, self._gone(member)) != FDS_BYTE:
                raise RendezvousError(f"{member.name} did not take the shared memory")
            sock.settimeout(None)
            undo.pop_all()
            return [sock.detach(), *segment]

    def _prove(self, sock: socket.socket, member: Member, claim: Claim) -> bytes:
        """Both prove who they are; returns the key for what follows on this connection."""
        dialer = handshake.Dialer(self._control.pair_key(member.index), claim)
        deadline, gone = time.monotonic() + DIAL_S, self._gone(member)
        what = f"the channel of ranks {claim.src} to {claim.dst} to {member.name}"
        try:
            sock.sendall(dialer.hello())
            sock.sendall(dialer.proof(_read(sock, handshake.ANSWER_BYTES, deadline, gone)))
            proof = _read(sock, handshake.PROOF_BYTES, deadline, gone)
        except TimeoutError:
            raise RendezvousError(f"{what}: no answer in {DIAL_S:.0f} s") from None
        except OSError as error:
            raise RendezvousError(f"{what} was refused ({error}); its log says why") from None
        if not dialer.check(proof):
            raise RendezvousError(f"{what}: whoever answered is not {member.name}")
        sock.settimeout(None)
        return dialer.stream_key()


def _key(member: Member, link: Link) -> tuple[int, str, str]:
    return member.index, link.mine.port.name, link.theirs.port.name


def _connected(address: str, port: int, gone: Callable[[], bool]) -> socket.socket:
    """A connection; an OSError if there is none within `DIAL_S`, or soon after the peer is `gone`."""
    deadline = time.monotonic() + DIAL_S
    sock = socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC
    )
    try:
        sock.setblocking(False)
        status = sock.connect_ex((address, port))
        if status == errno.EINPROGRESS:
            poller = select.poll()
            poller.register(sock, select.POLLOUT)
            while not poller.poll(_LOOK_S * 1000):
                if time.monotonic() > deadline or gone():
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise OSError(status, os.strerror(status))
        sock.settimeout(DIAL_S)
    except BaseException:
        sock.close()
        raise
    return sock


def _read(sock: socket.socket, count: int, deadline: float, gone: Callable[[], bool]) -> bytes:
    data = b""
    while len(data) < count:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        sock.settimeout(min(left, _LOOK_S))
        try:
            chunk = sock.recv(count - len(data))
        except TimeoutError:
            if gone():
                raise ConnectionError("its process is gone") from None
            continue
        if not chunk:
            raise ConnectionError("it closed the connection")
        data += chunk
    return data
