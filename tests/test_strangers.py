"""Whoever reaches a port without knowing the secret costs it little, and keeps nobody out."""

from __future__ import annotations

import ast
import collections
import contextlib
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from meeting import SECRET, Meeting, config

import jax_hetccl
from jax_hetccl.launch.ports import reserve_port
from jax_hetccl.rendezvous import acceptor as acceptor_
from jax_hetccl.rendezvous import addresses, channels, doorkeeper, handshake, messages, sockets
from jax_hetccl.rendezvous.acceptor import Acceptor, AcceptorHooks
from jax_hetccl.rendezvous.crowd import Crowd
from jax_hetccl.rendezvous.handshake import Claim

# What a ZeroMQ client that speaks CURVE says first.
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


# --- whom to drop --------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200), st.integers(1, 20))
def test_a_crowd_never_exceeds_its_limit_and_drops_the_oldest_of_the_largest(steps, limit):
    crowd, inside = Crowd[int](limit), {}
    for number, (source, leaves) in enumerate(steps):
        victim = crowd.add(number, source)
        inside[number] = source
        if victim is not None:
            counts = collections.Counter(inside.values())
            assert counts[inside[victim]] == max(counts.values())
            assert victim == min(n for n, s in inside.items() if s == inside[victim])
            del inside[victim]
        if leaves and inside:
            gone = next(iter(inside))
            crowd.discard(gone)
            crowd.discard(gone)
            del inside[gone]
        assert len(crowd) == len(inside) <= limit
        assert all(n in crowd for n in inside)
    while crowd.oust() is not None:
        pass
    assert len(crowd) == 0


def test_the_largest_source_loses_also_if_another_came_first():
    crowd = Crowd[str](4)
    assert [crowd.add(key, key[0]) for key in ("a1", "b1", "b2", "b3", "a2", "c1")] == [None] * 4 + ["b1", "a1"]


# --- ten thousand connections ----------------------------------------------------------------------


LIMIT = 1024  # descriptors that the besieged process may have


class Strangers:
    """Many connections to some ports. In turn: silent; a greeting and no more; byte by byte."""

    def __init__(self, ports: list[int], count: int) -> None:
        self.socks = []
        for number in range(count):
            sock = socket.create_connection(("127.0.0.1", ports[number % len(ports)]), timeout=20)
            sock.setblocking(False)
            self.socks.append(sock)
            if number // len(ports) % 3 == 1:
                with contextlib.suppress(OSError):
                    sock.send(GREETING)
        self._slow = self.socks[2 * len(ports) :: 3]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._drip)
        self._thread.start()

    def _drip(self) -> None:
        for byte in GREETING:
            for sock in self._slow:
                with contextlib.suppress(OSError):
                    sock.send(bytes([byte]))
            if self._stop.wait(0.2):
                return

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for sock in self.socks:
            sock.close()


class Besieged:
    """A process with left/0 of left:1,right:1, which may have few descriptors."""

    def __init__(self, descriptors: int) -> None:
        self.port = reserve_port()
        here = os.path.dirname(__file__)
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
        command = [sys.executable, os.path.join(here, "besieged.py"), str(self.port), SECRET, str(descriptors)]
        self._process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.heard: list[list] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            self.heard.append(json.loads(line))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def memory_kb(self) -> int:
        with open(f"/proc/{self._process.pid}/statm") as file:
            return int(file.read().split()[1]) * 4

    def wait_for(self, *words: object) -> None:
        deadline = time.monotonic() + 10
        while list(words) not in self.heard:
            assert time.monotonic() < deadline, (words, self.heard)
            time.sleep(0.02)

    def close(self) -> int:
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            return self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait(5)
            self._reader.join(5)
            self._process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture
def besieged() -> Iterator[Besieged]:
    made = Besieged(LIMIT)
    yield made
    made.close()


def many(soak: bool) -> int:
    """How many connections this process can make."""
    wanted = 30_000 if soak else 2_000
    for hard in (wanted + 200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]):
        soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # only the superuser may go beyond the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, wanted + 200)), max(most, hard)))
            break
    return min(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 200)


def test_thousands_of_strangers_use_up_nothing_and_keep_nobody_out(besieged, soak):
    """All three ports of a process that may have few descriptors; with --soak 10,000 connections to each."""
    listening, record = channels.listeners(config("right/0", besieged.port))
    for sock in listening:
        sock.close()
    with Meeting(besieged.port, clusters="left:1,right:1") as meeting:
        right = meeting.members["right/0"] = meeting.start("right/0", record).result(20)
        left = right.members[0].record
        before, memory = besieged.descriptors(), besieged.memory_kb()
        most = [0, 0]
        watching = threading.Event()

        def watch() -> None:
            while not watching.wait(0.05):
                most[:] = max(most[0], besieged.descriptors()), max(most[1], besieged.memory_kb())

        watcher = threading.Thread(target=watch)
        watcher.start()
        ports = [besieged.port, int(left["control"].rpartition(":")[2]), left["data"][1]]
        strangers = Strangers(ports, many(soak))
        try:
            # Messages of a member that was there before, a channel, and somebody who wants to join.
            right.publish("in the siege", 1)
            besieged.wait_for("heard", 1, "in the siege")
            dialing = channels.Opener(
                config("right/0", besieged.port, clusters="left:1,right:1", transport="tcp"), right
            )
            for fd in dialing.open(right.members[0], 1, 0).fds:
                os.close(fd)
            besieged.wait_for("channel", 1, 0)
            assert "right/0 is held by" in str(meeting.start("right/0").exception(10))
            # All of them still hold on, but no port keeps more than its bound once its thread has had its turn.
            bound = before + 2 * doorkeeper.LEAST_PENDING + acceptor_.MAX_PENDING + 16
            deadline = time.monotonic() + 15
            while besieged.descriptors() > bound:
                assert time.monotonic() < deadline, (besieged.descriptors(), before, bound)
                time.sleep(0.1)
        finally:
            strangers.close()
            watching.set()
            watcher.join()
        # Until a thread has had its turn there may be more, but never so many that none is left for others.
        assert most[0] < LIMIT
        assert most[1] - memory < 64 << 10
        deadline = time.monotonic() + 15
        while besieged.descriptors() > before + 4:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        right.publish("afterwards", 1)
        besieged.wait_for("heard", 1, "afterwards")


def test_a_flood_from_one_address_does_not_displace_a_member_at_another():
    class Hooks(AcceptorHooks):
        def key(self, member: int) -> bytes | None:
            return bytes(32)

        def refusal(self, claim: Claim) -> str | None:
            return None

        def blocks(self, claim: Claim) -> bool:
            return False

        def opened(self, claim: Claim, fds: list[int], keys: Sequence[bytes]) -> None:
            for fd in fds:
                os.close(fd)

    listener = addresses.listen_tcp("127.0.0.1", None)
    acceptor = Acceptor([listener])
    acceptor.start(Hooks())
    try:
        with socket.create_connection(listener.getsockname(), timeout=5) as sock:
            dialer = handshake.Dialer(bytes(32), Claim(0, 1, 0, 1, 0, 1, "tcp", bytes(8)))
            sock.sendall(dialer.hello())
            answer = sock.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL)
            flood = [
                socket.create_connection(listener.getsockname(), timeout=5, source_address=("127.0.0.2", 0))
                for _ in range(4 * acceptor_.MAX_PENDING)
            ]
            sock.sendall(dialer.proof(answer))  # a member far away, whose next message takes its time
            assert dialer.check(sock.recv(handshake.PROOF_BYTES, socket.MSG_WAITALL))
            for stranger in flood:
                stranger.close()
    finally:
        acceptor.close()


# --- bytes and time for each connection -------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    """A ROUTER with a doorkeeper, as the coordinator and every member have one, with a thread that serves it."""
    context = zmq.Context()
    router = sockets.server(context, zmq.curve_keypair())
    watched = doorkeeper.Doorkeeper(router, 2)
    found = sockets.bind_free(router, "127.0.0.1", None)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if watched.monitor.poll(20):
                watched.handle()

    thread = threading.Thread(target=serve)
    thread.start()
    yield found
    stop.set()
    thread.join()
    watched.close()
    router.close(0)
    context.term()


def ended_within(sock: socket.socket, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if selector.select(deadline - time.monotonic()):
                try:
                    if not sock.recv(4096):
                        return True
                except OSError:
                    return True
    return False


def test_a_message_too_large_for_a_stranger_is_not_even_read(port):
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(GREETING)
        size = messages.PORT_BYTES + 1
        sock.sendall(b"\x06" + size.to_bytes(8, "big") + b"\x05HELLO")  # a long command
        assert ended_within(sock, 3)


def test_a_slow_sender_has_as_long_as_anybody(monkeypatch):
    monkeypatch.setattr(sockets, "_HANDSHAKE_MS", 700)
    context = zmq.Context()
    router = sockets.server(context, zmq.curve_keypair())
    found = sockets.bind_free(router, "127.0.0.1", None)
    try:
        with socket.create_connection(("127.0.0.1", found), timeout=5) as sock:
            start = time.monotonic()
            for byte in GREETING:
                try:
                    sock.send(bytes([byte]))
                except OSError:
                    break
                time.sleep(0.05)
            assert ended_within(sock, 2) and time.monotonic() - start < 3
    finally:
        router.close(0)
        context.term()


def test_a_member_that_speaks_is_no_stranger_however_many_come(monkeypatch):
    """Its connection stays the same through a flood that displaces all others of its address."""
    monkeypatch.setattr(doorkeeper, "LEAST_PENDING", 8)
    with Meeting(clusters="left:1,right:1") as meeting:
        left, right = meeting.join("left/0", "right/0")
        left.publish("before", 1)
        right.collect("before", [0], 5)
        connections = left._links[1]._connections
        port = int(right.members[1].record["control"].rpartition(":")[2])
        strangers = Strangers([port], 100)
        try:
            left.publish("after", 1)
            assert right.collect("after", [0], 5) == {0: 1}
            assert ended_within(strangers.socks[0], 5)
            assert left._links[1]._connections == connections
        finally:
            strangers.close()


def test_values_larger_than_a_message_come_in_pieces():
    with Meeting(clusters="left:1,right:1") as meeting:
        left, right = meeting.join("left/0", "right/0")
        value = os.urandom(10 * messages.PIECE_BYTES + 7)
        left.publish("large", value)
        left.publish("small", 1)
        assert right.collect("small", [0], 10) == {0: 1}
        assert right.collect("large", [0], 10) == {0: value}


def test_the_public_key_alone_opens_nothing():
    """Who knows a port's public key finishes CURVE's handshake up to admission, and is refused there."""
    with Meeting(clusters="left:1,right:1") as meeting:
        _, right = meeting.join("left/0", "right/0")
        context = zmq.Context()
        stranger = sockets.client(context, zmq.curve_keypair(), right.members[1].record["curve"])
        monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        stranger.connect(right.members[1].record["control"])
        assert monitor.poll(5000)
        kind = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        assert kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        stranger.disable_monitor()
        monitor.close(0)
        stranger.close(0)
        context.term()


def test_nothing_that_a_peer_sends_is_evaluated_and_proofs_are_compared_in_constant_time():
    package = Path(jax_hetccl.__file__).parent
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & {
                "pickle",
                "marshal",
                "shelve",
                "dill",
                "cloudpickle",
            }, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
    # In the handshake "==" stands between the magic's bytes only, which are no secret.
    compared = [
        ast.unparse(node)
        for node in ast.walk(ast.parse((package / "rendezvous" / "handshake.py").read_text()))
        if isinstance(node, ast.Compare)
    ]
    assert compared == ["hello[:len(_MAGIC)] != _MAGIC"]


@pytest.mark.parametrize("side", ["dialer", "acceptor"])
def test_a_proof_is_judged_by_nothing_but_the_constant_time_comparison(side, monkeypatch):
    asked: list[tuple[bytes, bytes]] = []
    monkeypatch.setattr(handshake.hmac, "compare_digest", lambda a, b: bool(asked.append((a, b))))
    dialer = handshake.Dialer(bytes(32), Claim(0, 1, 0, 1, 0, 1, "tcp", bytes(8)))
    taker = handshake.Acceptor(dialer.hello())
    proof = dialer.proof(taker.answer())
    if side == "acceptor":
        assert taker.check(bytes(32), proof) is None
    else:
        assert not dialer.check(taker.proof(bytes(32)))
    assert len(asked) == 1 and asked[0][0] == asked[0][1]
