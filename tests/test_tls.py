"""HETCCL_TLS=1: what goes over TCP is encrypted, with a key that only the two ends have."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from meeting import Meeting, config
from tls_programs import TEXT

from harness.layout import Layout
from harness.pool import World
from jax_hetccl import _native
from jax_hetccl._config import resolve
from jax_hetccl._engines import ensure_tls
from jax_hetccl._errors import ConfigError, RendezvousError
from jax_hetccl.connect import Channels
from jax_hetccl.doctor import BAD, GOOD, NOTE, software
from jax_hetccl.rendezvous import channels, handshake, keys, setups
from jax_hetccl.rendezvous.acceptor import Acceptor
from jax_hetccl.routes import Equipment

TWO = "left:1,right:1"
GIVEN = {"HETCCL_COORDINATOR": "localhost:1", "HETCCL_CLUSTERS": "a:1", "HETCCL_CLUSTER": "a", "HETCCL_TLS": "1"}


# --- keys and settings ---------------------------------------------------------------------------


def test_both_ends_derive_one_key_and_no_two_connections_the_same() -> None:
    claim = handshake.Claim(0, 1, 0, 1, 0, 1, "tcp", bytes(8))

    def meet(pair: bytes) -> tuple[bytes, bytes]:
        dialer = handshake.Dialer(pair, claim)
        acceptor = handshake.Acceptor(dialer.hello())
        assert acceptor.check(pair, dialer.proof(acceptor.answer())) == claim
        assert dialer.check(acceptor.proof(pair))
        return dialer.stream_key(), acceptor.stream_key(pair)

    (a, b), (c, d) = meet(b"p" * 32), meet(b"p" * 32)
    assert a == b and c == d and a != c and len(a) == 32
    assert keys.stream_key(b"q" * 32, b"said") != keys.stream_key(b"p" * 32, b"said")


def test_the_setting() -> None:
    assert resolve({**GIVEN, "HETCCL_TLS": "0"}).tls is False
    assert resolve(GIVEN).tls is True
    with pytest.raises(ConfigError, match="HETCCL_TRANSPORT=rdma with HETCCL_TLS=1: .* not encrypted; use auto or tcp"):
        resolve({**GIVEN, "HETCCL_TRANSPORT": "rdma"})


def test_auto_leaves_rdma_out_and_says_why() -> None:
    found = Equipment.of(resolve(GIVEN)).found
    assert not found.ports and "HETCCL_TLS=1" in found.missing


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_tls("left/0")

    def missing() -> str:
        raise RuntimeError("hetccl: no TLS: libssl.so.3: cannot open shared object file")

    monkeypatch.setattr(_native, "tls_library", missing)
    with pytest.raises(ConfigError, match=r"left/0: no TLS: libssl\.so\.3"):
        ensure_tls("left/0")


def test_the_doctor_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETCCL_TLS", raising=False)
    [found] = [check for check in software.software_checks() if check.name == "TLS"]
    assert found.state == GOOD and _native.tls_library() in found.found
    for missing, expected in (("", "; the kernel sends"), ("no module", "; OpenSSL sends, not the kernel (no module)")):
        monkeypatch.setattr(_native, "kernel_tls_missing", lambda missing=missing: missing)
        [found] = [check for check in software.software_checks() if check.name == "TLS"]
        assert found.state == GOOD and found.found.endswith(expected)

    def no_library() -> str:
        raise RuntimeError("hetccl: no TLS: libssl.so.3: cannot open shared object file")

    monkeypatch.setattr(_native, "tls_library", no_library)
    [found] = [check for check in software.software_checks() if check.name == "TLS"]
    assert found.state == NOTE and found.found == "libssl.so.3: cannot open shared object file"
    monkeypatch.setenv("HETCCL_TLS", "1")  # then `initialize` fails
    [found] = [check for check in software.software_checks() if check.name == "TLS"]
    assert found.state == BAD and "HETCCL_TLS=1 is set" in found.fix
    monkeypatch.setenv("HETCCL_TLS", "maybe")
    [found] = [check for check in software.software_checks() if check.name == "TLS"]
    assert found.state == BAD and "HETCCL_TLS" in found.found


# --- opening channels ----------------------------------------------------------------------------


class Opened:
    """Two members with channels to native engines."""

    def __init__(self, meeting: Meeting) -> None:
        self.channels: dict[str, Channels] = {}
        self.reported: dict[str, list[tuple[str, str]]] = {}
        self.engines: dict[str, _native.Engine] = {}
        names, acceptors, started = ("left/0", "right/0"), {}, {}
        for name in names:
            mine = config(name, meeting.port, clusters=TWO, transport="tcp", tls=True)
            listening, record = channels.listeners(mine)
            acceptors[name] = Acceptor(listening), mine
            started[name] = meeting.start(name, record)
        for rank, name in enumerate(names):
            control = meeting.members[name] = started[name].result(20)
            engine = self.engines[name] = _native.Engine(epoch=control.epoch, abort_grace_s=0.1)
            engine.set_local_device(0, rank)
            acceptor, mine = acceptors[name]
            opener = channels.Opener(mine, control)
            reported = self.reported[name] = []
            self.channels[name] = Channels(
                engine,
                control,
                opener,
                acceptor,
                {0: 0, 1: 1},
                lambda *report, reported=reported: reported.append(report),
                tls=True,
            )

    def close(self) -> None:
        for made in self.channels.values():
            made.close()
        for engine in self.engines.values():
            engine.close(5.0)
        for made in self.channels.values():
            made.join()


@pytest.fixture
def opened() -> Iterator[Opened]:
    with Meeting(clusters=TWO) as meeting:
        made = Opened(meeting)
        yield made
        made.close()


def test_channels_open_both_ways(opened: Opened) -> None:
    for name, pair in (("left/0", (0, 1)), ("right/0", (1, 0))):
        opened.channels[name].ensure([pair])
        assert opened.channels[name].transports()[pair] == "tcp"
    assert opened.engines["left/0"].failure() is None


def test_an_end_without_the_key_gets_no_channel(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after somebody who relays the proofs, and wants to speak for one of the two from then on."""
    monkeypatch.setattr(handshake.Acceptor, "stream_key", lambda self, key: bytes(32))
    with pytest.raises(RendezvousError, match="ranks 0 to 1 to right/0: TLS from 127.0.0.1:.*handshake failed"):
        opened.channels["left/0"].ensure([(0, 1)])
    assert (0, 1) not in opened.channels["left/0"].transports()
    opened.channels["right/0"].close()
    opened.channels["right/0"].join()
    assert any("no tcp channel from rank 0 to 1: TLS" in record.getMessage() for record in caplog.records)
    assert not opened.reported["right/0"], "the dialer knows"


class WithoutSlots:
    """An engine that does the handshakes of a channel, and then cannot make its slots."""

    def __init__(self, engine: _native.Engine) -> None:
        self._engine = engine

    def add_channel(self, **channel: Any) -> None:
        self._engine.add_channel(**channel)
        raise RuntimeError("hetccl: no memory for slots")


def test_a_failure_behind_the_handshake_is_reported(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    right = opened.channels["right/0"]
    monkeypatch.setattr(right, "_engine", WithoutSlots(opened.engines["right/0"]))
    opened.channels["left/0"].ensure([(0, 1)])
    deadline = time.monotonic() + 20
    while not opened.reported["right/0"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert opened.reported["right/0"] == [
        ("internal", "the channel of ranks 0 to 1 could not be set up: no memory for slots")
    ]


def test_without_descriptors_none_is_lost() -> None:
    class Full(socket.socket):
        def dup(self) -> socket.socket:
            raise OSError(errno.EMFILE, "Too many open files")

    def started(socks: list[socket.socket]) -> list[list[int]]:
        acted: list[list[int]] = []
        made = setups.Setups()
        made.start(socks, acted.append)
        made.join()
        return acted

    (first, peer), before = socket.socketpair(), len(os.listdir("/proc/self/fd"))
    with peer, Full() as full:
        assert not started([first, full])
    assert len(os.listdir("/proc/self/fd")) == before - 2
    first, peer = socket.socketpair()
    with peer:
        [[descriptor]] = started([first])
        os.close(descriptor)
        assert peer.recv(1) == b"", "the copy was the last"


def certified(directory: Path) -> ssl.SSLContext:
    """A server's context with a certificate that it made itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "right/0")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .sign(key, hashes.SHA256())
    )
    pem, private = directory / "cert.pem", directory / "key.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    private.write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, private)
    return context


def test_a_certificate_does_not_stand_for_the_key(tmp_path: Path) -> None:
    context = certified(tmp_path)
    engine = _native.Engine(epoch=1, abort_grace_s=0.1)
    engine.set_local_device(0, 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()

    theirs.settimeout(20)

    def serve() -> None:
        with contextlib.suppress(OSError), context.wrap_socket(theirs, server_side=True) as stream:
            stream.recv(1)

    serving = threading.Thread(target=serve)
    serving.start()
    with pytest.raises(RuntimeError, match="TLS from 127.0.0.1:.*certificate verify failed"):
        engine.add_channel(
            local_rank=0, peer_rank=1, outgoing=True, transport="tcp", fds=[ours.detach()], tls_keys=[bytes(32)]
        )
    serving.join(10)
    assert not serving.is_alive()
    engine.close(5.0)


def test_only_tcp_can_be_in_tls() -> None:
    engine = _native.Engine(epoch=1, abort_grace_s=0.1)
    engine.set_local_device(0, 0)
    with pytest.raises(RuntimeError, match="over shm cannot be in TLS"):
        engine.add_channel(local_rank=0, peer_rank=1, outgoing=True, transport="shm", fds=[], tls_keys=[bytes(32)])
    engine.close(5.0)


# --- a world -------------------------------------------------------------------------------------


class Tap:
    """Counts the text of `tls_programs` in what the loopback interface carries, of all processes. Needs root.

    A context manager; `found` is complete behind it.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
        self._socket.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.1)
        self.found = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._listen)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(20)
        self._socket.close()

    def _listen(self) -> None:
        while True:
            try:
                self.found += self._socket.recv(1 << 17).count(TEXT)
            except TimeoutError:
                if self._done.is_set():
                    return


def _no_tap() -> str:
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EAFNOSUPPORT):
            return f"listening to an interface: {error}"
        raise
    return ""


@pytest.mark.skipif(bool(why := _no_tap()), reason=why or "there is a tap")
def test_sums_are_the_same_and_only_without_tls_on_the_wire() -> None:
    repeats, sums, found = 40_000, {}, {}
    for tls in ("0", "1"):
        with World(Layout.parse("1/1"), "tcp", environment={"HETCCL_TLS": tls}) as world, Tap() as tap:
            replies = world.request(60, op="call", call="tls_programs:summed", arguments={"repeats": repeats})
        found[tls] = tap.found
        sums[tls] = {reply.raw["sum"] for reply in replies}
        assert {reply.raw["first"] for reply in replies} == {2 * int.from_bytes(TEXT[:2], "little")}
    assert sums["0"] == sums["1"] and len(sums["1"]) == 1
    assert found["0"] > repeats / 2, "the tap hears nothing"  # of both directions, however few it keeps
    assert found["1"] == 0
