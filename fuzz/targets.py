"""Whatever parses the bytes of strangers and peers in Python, as functions of bytes.

A target raises nothing, whatever the bytes are: what it catches is what its caller in the package catches. `tests/test_fuzz.py`
replays the corpus, `fuzz/explore.py` looks for new inputs.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import logging
import os
import socket
import struct
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "jax_hetccl" not in sys.modules:  # the parts below need nothing of JAX, which takes long to load
    package = types.ModuleType("jax_hetccl")
    package.__path__ = [str(Path(__file__).resolve().parent.parent / "jax_hetccl")]
    sys.modules["jax_hetccl"] = package

from jax_hetccl import _secret
from jax_hetccl._config import resolve
from jax_hetccl._errors import ConfigError
from jax_hetccl.rdma.ports import Port
from jax_hetccl.rendezvous import addresses, handshake, messages
from jax_hetccl.rendezvous.acceptor import Acceptor, AcceptorHooks, _Pending
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.coordinator import Coordinator
from jax_hetccl.rendezvous.handshake import Claim
from jax_hetccl.rendezvous.link import Link
from jax_hetccl.rendezvous.member import Member

CORPUS = Path(__file__).with_name("corpus")
KEY = hashlib.sha256(b"fuzz").digest()


def parts(data: bytes) -> Iterator[bytes]:
    """Cuts an input into messages: two bytes of length before each."""
    while len(data) >= 2:
        (size,) = struct.unpack_from("<H", data)
        yield data[2 : 2 + size]
        data = data[2 + size :]


# --- data channels ---------------------------------------------------------------------------------


class _Hooks(AcceptorHooks):
    def key(self, member: int) -> bytes | None:
        return KEY if member < 4 else None

    def refusal(self, claim: Claim) -> str | None:
        return None if claim.transport in ("tcp", "shm") else "unknown"

    def opened(self, claim: Claim, fds: list[int]) -> None:
        assert 0 < len(fds) <= 17 and claim.dialer < 4
        for fd in fds:
            os.close(fd)


def _accept(speeches: list[Callable[[socket.socket, Callable[[], None]], None]]) -> None:
    """Lets an acceptor read what each of these says on a connection of its own."""
    acceptor = Acceptor([])
    acceptor._hooks = _Hooks()
    ends = []
    try:
        for speech in speeches:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            ends.append(theirs)
            pending = acceptor._pending[ours] = _Pending(ours, 0.0)
            acceptor._strangers.add(ours, "fuzz")
            acceptor._selector.register(ours, 1)

            def read(pending: _Pending = pending, ours: socket.socket = ours) -> None:
                for _ in range(5):
                    if ours in acceptor._pending:
                        acceptor._step(pending)

            with contextlib.suppress(OSError):
                speech(theirs, read)
            read()
    finally:
        for end in ends:
            end.close()
        acceptor.close()


def acceptor(data: bytes) -> None:
    """What a stranger sends to a data port."""

    def speech(sock: socket.socket, read: Callable[[], None]) -> None:
        for part in parts(data):
            sock.sendall(part)
            read()

    _accept([speech])


def claims(data: bytes) -> None:
    """What a member claims, whose proof holds, on some connections; and what follows it."""
    size = len(Claim(0, 0, 0, 0, 0, 0, "", b"").pack())

    def speech(claim: bytes, more: bytes) -> Callable[[socket.socket, Callable[[], None]], None]:
        def speak(sock: socket.socket, read: Callable[[], None]) -> None:
            dialer = handshake.Dialer(KEY, Claim.unpack(claim))
            dialer._claim = claim
            sock.sendall(dialer.hello())
            read()
            sock.sendall(dialer.proof(sock.recv(handshake.ANSWER_BYTES, socket.MSG_DONTWAIT)) + more)
            read()

        return speak

    _accept([speech(part[:size].ljust(size, b"\0"), part[size:]) for part in parts(data)][:20])


# --- messages --------------------------------------------------------------------------------------


def message(data: bytes) -> None:
    """Any bytes that should be a message."""
    fields = messages.unpack(data)
    assert fields is None or isinstance(fields[0], str)


def joining(data: bytes) -> None:
    """What members send to the coordinator: the first byte of each message says who."""
    made = Coordinator.__new__(Coordinator)
    made._names = ("left/0", "left/1", "right/0")
    made._seats, made._challengers, made._gone, made._world = {}, {}, {}, None
    made._gate = types.SimpleNamespace(refused={})  # type: ignore[assignment]
    made._router_send = lambda route, data: None  # type: ignore[method-assign]
    for part in parts(data):
        if part:
            made._take([*made._names, "stranger"][part[0] % 4], b"route", part[1:])
    assert set(made._seats) <= set(made._names) and len(made._challengers) <= 1024


def control(data: bytes) -> None:
    """What another member sends to this one."""
    link = Link.__new__(Link)
    link.received, link.departed, link.lost, link._sent = 0, False, False, 3
    link._kept, link._pieces = collections.deque((n, b"") for n in (1, 2, 3)), []
    made = ControlPlane.__new__(ControlPlane)
    made.members = tuple(Member(n, n, name, 0, {}) for n, name in enumerate(("left", "right")))
    made._links, made._values, made._malformed = {1: link}, {}, set()
    made._condition, made._handlers, made._closing = threading.Condition(), [("", lambda *_: None)], False
    for part in parts(data):
        made._take(1, part)
    assert all(isinstance(key, str) for key in made._values)


# --- settings and records --------------------------------------------------------------------------


def settings(data: bytes) -> None:
    """The environment: a wrong one is a `ConfigError` and nothing else."""
    names = ("COORDINATOR", "CLUSTERS", "CLUSTER", "PROCESS", "PORT_RANGE", "SOCKET_IFNAME", "AXES", "IB_HCA", "SECRET")
    texts = [part.decode(errors="replace").replace("\0", "") for part in parts(data)]
    environ = {f"HETCCL_{name}": text for name, text in zip(names, texts, strict=False)}
    with contextlib.suppress(ConfigError):
        resolve(environ)
    with contextlib.suppress(ValueError):
        _secret.check_strength(texts[-1] if texts else "")
    for text in texts:
        with contextlib.suppress(ValueError):  # a sequence that never ends
            addresses.matches(text, "eth0")


def port_record(data: bytes) -> None:
    """What another member published about a port for RDMA, however it is made."""
    value: Any = messages.unpack(data)
    if value and isinstance(value[-1], dict):
        with contextlib.suppress(TypeError, KeyError):
            Port.from_record(value[-1])


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (acceptor, claims, message, joining, control, settings, port_record)
}


def replay(target: str) -> int:
    """Runs a target over its corpus, each input whole and cut short; returns how many inputs there are."""
    files = sorted((CORPUS / f"py_{target}").iterdir())
    log = logging.getLogger("jax_hetccl")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        for file in files:
            data = file.read_bytes()
            for size in (*range(0, len(data), 1 + len(data) // 32), len(data)):
                TARGETS[target](data[:size])
    finally:
        log.setLevel(level)
    return len(files)
