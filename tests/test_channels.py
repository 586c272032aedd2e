"""Data channels: mutual proof before anything else, bounds for strangers, descriptors for the engine."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meeting import Meeting, config

from jax_hetccl._errors import ConfigError, RendezvousError
from jax_hetccl.connect import Channels
from jax_hetccl.launch.ports import reserve_port
from jax_hetccl.rendezvous import acceptor as acceptor_
from jax_hetccl.rendezvous import addresses, channels, handshake
from jax_hetccl.rendezvous.acceptor import Acceptor, AcceptorHooks
from jax_hetccl.rendezvous.handshake import Claim
from jax_hetccl.rendezvous.member import Member

KEY = bytes(range(32))
CLAIM = Claim(0, 1, src=2, dst=5, stripe=0, stripes=1, transport="tcp", attempt=b"12345678")


# --- the handshake itself ------------------------------------------------------------------------


def exchange(dialer_key: bytes, acceptor_key: bytes, alter: Callable[[int, bytes], bytes] = lambda _, m: m):
    """Runs a handshake; `alter` may change message number n on its way. Returns (claim, dialer agrees)."""
    dialer = handshake.Dialer(dialer_key, CLAIM)
    acceptor = handshake.Acceptor(alter(0, dialer.hello()))
    proof = dialer.proof(alter(1, acceptor.answer()))
    claim = acceptor.check(acceptor_key, alter(2, proof))
    if claim is None:
        return None, False
    return claim, dialer.check(alter(3, acceptor.proof(acceptor_key)))


def test_both_sides_agree():
    assert exchange(KEY, KEY) == (CLAIM, True)


def test_messages_have_the_announced_sizes():
    dialer = handshake.Dialer(KEY, CLAIM)
    acceptor = handshake.Acceptor(dialer.hello())
    assert len(dialer.hello()) == handshake.HELLO_BYTES and len(acceptor.answer()) == handshake.ANSWER_BYTES
    assert len(dialer.proof(acceptor.answer())) == len(acceptor.proof(KEY)) == handshake.PROOF_BYTES


def test_another_key_proves_nothing_to_either_side():
    assert exchange(KEY, KEY[::-1]) == (None, False)


@given(st.integers(0, 3), st.data())
def test_any_flipped_bit_breaks_the_proof(number, data):
    def flip(n: int, message: bytes) -> bytes:
        if n != number:
            return message
        bit = data.draw(st.integers(0, 8 * len(message) - 1))
        return bytes(b ^ (1 << bit % 8 if i == bit // 8 else 0) for i, b in enumerate(message))

    try:
        claim, agreed = exchange(KEY, KEY, flip)
    except ValueError:
        return  # the magic
    assert claim is None if number < 3 else not agreed


def test_a_recorded_dialer_cannot_be_replayed():
    dialer = handshake.Dialer(KEY, CLAIM)
    first = handshake.Acceptor(dialer.hello())
    proof = dialer.proof(first.answer())
    assert first.check(KEY, proof)
    assert handshake.Acceptor(dialer.hello()).check(KEY, proof) is None


def test_a_proof_reflected_to_its_sender_is_worthless():
    dialer = handshake.Dialer(KEY, CLAIM)
    proof = dialer.proof(os.urandom(handshake.ANSWER_BYTES))
    assert not dialer.check(proof)


@given(st.binary(min_size=handshake.HELLO_BYTES, max_size=handshake.HELLO_BYTES), st.binary(max_size=64))
def test_random_bytes_never_crash_and_never_prove(hello, proof):
    hello = b"HETCCL\x00\x02" + hello[8:]
    assert handshake.Acceptor(hello).check(KEY, proof) is None


# --- the accept thread -----------------------------------------------------------------------------


class Hooks(AcceptorHooks):
    """Accepts what member 0 dials, and remembers the channels."""

    def __init__(self) -> None:
        self.channels: list[tuple[Claim, list[int]]] = []
        self.came = threading.Event()

    def key(self, member: int) -> bytes | None:
        if member == 13:
            raise KeyError(member)
        return KEY if member == 0 else None

    def refusal(self, claim: Claim) -> str | None:
        return "not here" if claim.dst == 99 else None

    def blocks(self, claim: Claim) -> bool:
        return False

    def opened(self, claim: Claim, fds: list[int], keys: Sequence[bytes]) -> None:
        self.channels.append((claim, fds))
        self.came.set()


@pytest.fixture
def served():
    listener = addresses.listen_tcp("127.0.0.1", None)
    acceptor, hooks = Acceptor([listener]), Hooks()
    acceptor.start(hooks)
    yield listener.getsockname(), hooks
    acceptor.close()
    for _, fds in hooks.channels:
        for fd in fds:
            os.close(fd)


def prove(address, claim: Claim = CLAIM, key: bytes = KEY, extra: bytes = b"") -> socket.socket:
    """Dials and authenticates by hand."""
    sock = socket.create_connection(address, timeout=5)
    dialer = handshake.Dialer(key, claim)
    sock.sendall(dialer.hello())
    answer = sock.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL)
    sock.sendall(dialer.proof(answer) + extra)
    if not dialer.check(sock.recv(handshake.PROOF_BYTES, socket.MSG_WAITALL)):
        sock.close()
        raise ConnectionError
    return sock


def ended(sock: socket.socket, within: float) -> bool:
    """Whether the other side closes in time."""
    sock.settimeout(within)
    try:
        while sock.recv(1024):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_a_member_gets_a_channel_and_not_a_byte_is_swallowed(served):
    address, hooks = served
    sock = prove(address, extra=b"payload that follows at once")
    assert hooks.came.wait(5)
    claim, [fd] = hooks.channels[0]
    assert claim == CLAIM
    assert os.read(fd, 100) == b"payload that follows at once"
    os.write(fd, b"and back")
    assert sock.recv(100) == b"and back"
    sock.close()


def test_stripes_are_put_in_order_and_attempts_kept_apart(served):
    address, hooks = served
    stale = dataclasses.replace(CLAIM, stripe=0, stripes=2, attempt=b"stale...")
    socks = [prove(address, stale)]
    time.sleep(0.1)
    for stripe in (1, 0):
        socks.append(prove(address, dataclasses.replace(CLAIM, stripe=stripe, stripes=2)))
    assert hooks.came.wait(5) and len(hooks.channels) == 1
    _, fds = hooks.channels[0]
    for sock, word in zip(socks[1:], (b"one", b"zero"), strict=True):
        sock.sendall(word)
    assert [os.read(fd, 10) for fd in fds] == [b"zero", b"one"]
    for sock in socks:
        sock.close()


@pytest.mark.parametrize(
    ("claim", "key"),
    [
        (CLAIM, KEY[::-1]),
        (dataclasses.replace(CLAIM, dialer=7), KEY),
        (dataclasses.replace(CLAIM, dst=99), KEY),
        (dataclasses.replace(CLAIM, stripe=2, stripes=2), KEY),
        (dataclasses.replace(CLAIM, stripes=0), KEY),
        (dataclasses.replace(CLAIM, stripes=60000), KEY),
    ],
)
def test_wrong_proofs_and_wrong_claims_get_nothing(served, claim, key):
    address, hooks = served
    with pytest.raises(ConnectionError):
        prove(address, claim, key)
    prove(address).close()  # and the next one is served
    assert hooks.came.wait(5) and len(hooks.channels) == 1


def test_a_stranger_is_dropped_at_the_first_message(served):
    address, _ = served
    sock = socket.create_connection(address)
    sock.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\nAccept: everything, please\r\n\r\n" * 3)
    assert ended(sock, 2)
    sock.close()


def test_slow_strangers_are_dropped_and_hold_up_nobody(served, monkeypatch):
    monkeypatch.setattr(acceptor_, "HANDSHAKE_S", 0.6)
    address, hooks = served
    slow = [socket.create_connection(address) for _ in range(20)]
    for sock in slow[::2]:
        sock.sendall(b"HET")
    start = time.monotonic()
    prove(address).close()
    assert hooks.came.wait(5) and time.monotonic() - start < 0.5
    assert all(ended(sock, 3) for sock in slow)
    for sock in slow:
        sock.close()


def test_idle_strangers_cannot_use_up_descriptors(served):
    address, hooks = served
    before = len(os.listdir("/proc/self/fd"))
    strangers = [socket.create_connection(address) for _ in range(3 * acceptor_.MAX_PENDING)]
    prove(address).close()
    assert hooks.came.wait(5)
    now = len(os.listdir("/proc/self/fd"))
    assert now - before - len(strangers) <= acceptor_.MAX_PENDING + 2
    for sock in strangers:
        sock.close()


def test_a_handshake_in_single_bytes_is_fine(served):
    address, hooks = served
    sock = socket.create_connection(address, timeout=5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    dialer = handshake.Dialer(KEY, CLAIM)
    for byte in dialer.hello():
        sock.sendall(bytes([byte]))
    for byte in dialer.proof(sock.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL)):
        sock.sendall(bytes([byte]))
    assert hooks.came.wait(5)
    sock.close()


def test_what_one_connection_brings_about_does_not_end_the_accept_thread(served):
    address, hooks = served
    with pytest.raises(ConnectionError):
        prove(address, dataclasses.replace(CLAIM, dialer=13))  # the hook raises KeyError
    one = prove(address, dataclasses.replace(CLAIM, stripe=1, stripes=2))
    two = prove(address, dataclasses.replace(CLAIM, stripe=0, stripes=3))  # the same attempt, another count
    prove(address, dataclasses.replace(CLAIM, attempt=b"another.")).close()
    assert hooks.came.wait(5) and len(hooks.channels) == 1
    one.close()
    two.close()


def test_closing_after_the_accept_thread_has_failed(monkeypatch):
    acceptor = Acceptor([addresses.listen_tcp("127.0.0.1", None)])

    def fails() -> None:
        raise RuntimeError("by the test")

    monkeypatch.setattr(acceptor, "_expire", fails)
    before = len(os.listdir("/proc/self/fd"))
    acceptor.start(Hooks())
    acceptor._thread.join(5)
    assert not acceptor._thread.is_alive()
    acceptor.close()
    acceptor.close()
    assert len(os.listdir("/proc/self/fd")) == before - 3  # the listener, the selector, the eventfd


# --- opening, between members ---------------------------------------------------------------------


class PairHooks(AcceptorHooks):
    """What `connect.Channels` does, for one pair of members."""

    def __init__(self, control) -> None:
        self.control = control
        self.opened_: list[tuple[Claim, list[int]]] = []
        self.came = threading.Event()

    def key(self, member: int) -> bytes | None:
        return self.control.pair_key(member)

    def refusal(self, claim: Claim) -> str | None:
        return None

    def blocks(self, claim: Claim) -> bool:
        return False

    def opened(self, claim: Claim, fds: list[int], keys: Sequence[bytes]) -> None:
        self.opened_.append((claim, fds))
        self.came.set()


@pytest.fixture
def two():
    """Two members: (opener of left/0, Member right/0, hooks of right/0)."""
    names = ("left/0", "right/0")
    with Meeting(clusters="left:1,right:1") as meeting:
        acceptors, started = {}, {}
        for name in names:
            listening, record = channels.listeners(config(name, meeting.port))
            acceptors[name] = Acceptor(listening)
            started[name] = meeting.start(name, record)
        for name in names:
            meeting.members[name] = started[name].result(20)
        left, right = (meeting.members[name] for name in names)
        hooks = PairHooks(right)
        acceptors["right/0"].start(hooks)
        yield left, right, hooks
        for acceptor in acceptors.values():
            acceptor.close()
        for _, fds in hooks.opened_:
            for fd in fds:
                os.close(fd)


def opener(left, **settings) -> channels.Opener:
    nobody = 1  # it never asks a coordinator
    return channels.Opener(config("left/0", nobody, clusters="left:1,right:1", **settings), left)


def test_tcp_channels_have_stripes_on_loopback(two):
    left, _, hooks = two
    transport, fds, *_ = opener(left).open(left.members[1], 0, 1)
    assert transport == "tcp" and len(fds) == channels.LOOPBACK_STRIPES
    assert hooks.came.wait(5)
    claim, theirs = hooks.opened_[0]
    assert (claim.src, claim.dst, claim.transport) == (0, 1, "tcp")
    for stripe, (mine, other) in enumerate(zip(fds, theirs, strict=True)):
        os.write(mine, bytes([stripe]))
        assert os.read(other, 10) == bytes([stripe])
        os.close(mine)
        assert os.read(other, 10) == b""  # the end of a process shows at once


def segment() -> list[int]:
    memory = os.memfd_create("ring")
    os.ftruncate(memory, 4096)
    return [memory]


def test_shm_channels_carry_descriptors(two):
    left, _, hooks = two
    transport, [sock, memory], *_ = opener(left).open(left.members[1], 0, 1, segment)
    assert transport == "shm" and hooks.came.wait(5)
    claim, [stream, theirs] = hooks.opened_[0]
    assert claim.transport == "shm"
    os.pwrite(memory, b"shared", 100)
    assert os.pread(theirs, 6, 100) == b"shared"
    assert not os.get_inheritable(theirs) and not os.get_inheritable(stream)
    os.write(sock, b"bell")
    assert os.read(stream, 10) == b"bell"
    os.close(sock)
    os.close(memory)


@pytest.mark.parametrize("count", [0, 2, 20])
def test_shm_takes_one_descriptor_and_nothing_else(two, count):
    left, _, hooks = two

    def segments() -> list[int]:
        return [fd for _ in range(count) for fd in segment()]

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RendezvousError):
        opener(left, transport="shm").open(left.members[1], 0, 1, segments)
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(os.listdir("/proc/self/fd")) == before and not hooks.opened_


def test_auto_falls_back_to_tcp_once_and_shm_refuses(two):
    left, _, _ = two
    gone = dataclasses.replace(left.members[1], record={**left.members[1].record, "unix": "nobody-there"})
    auto = opener(left)
    transport, fds, *_ = auto.open(gone, 0, 1, segment)
    assert transport == "tcp"
    for fd in fds:
        os.close(fd)
    with pytest.raises(RendezvousError, match="HETCCL_TRANSPORT=shm, but right/0 cannot be reached"):
        opener(left, transport="shm").open(gone, 0, 1, segment)
    far = dataclasses.replace(gone, record={**gone.record, "boot": "another machine"})
    with pytest.raises(RendezvousError, match="another host"):
        opener(left, transport="shm").open(far, 0, 1, segment)


def test_without_memory_auto_falls_back_and_leaves_no_descriptor(two):
    left, _, _ = two

    def fails() -> list[int]:
        raise OSError("no space left")

    before = len(os.listdir("/proc/self/fd"))
    transport, fds, *_ = opener(left).open(left.members[1], 0, 1, fails)
    assert transport == "tcp"
    for fd in fds:
        os.close(fd)
    time.sleep(0.3)
    assert len(os.listdir("/proc/self/fd")) <= before + channels.LOOPBACK_STRIPES  # the acceptor's ends


def test_a_member_of_another_world_is_refused(two):
    """Same secret, same names, same addresses, but another world: its keys fit nowhere."""
    left, _, hooks = two
    with Meeting(clusters="left:1,right:1") as other:
        record = left.members[0].record
        started = other.start("left/0", {"data": record["data"]}), other.start("right/0")
        zombie, other.members["right/0"] = (future.result(20) for future in started)
        other.members["left/0"] = zombie
        record = {**left.members[1].record, "curve": zombie.members[1].record["curve"]}
        with pytest.raises(RendezvousError, match="was refused"):
            opener(zombie).open(Member(1, 1, "right", 0, record), 0, 1)
    assert not hooks.opened_


def test_whoever_listens_on_a_members_port_must_prove_it(two):
    left, _, _ = two
    impostor = addresses.listen_tcp("127.0.0.1", None)

    def answer() -> None:
        sock, _ = impostor.accept()
        sock.recv(handshake.HELLO_BYTES)
        sock.sendall(os.urandom(handshake.ANSWER_BYTES))
        sock.recv(handshake.PROOF_BYTES)
        sock.sendall(os.urandom(handshake.PROOF_BYTES))
        time.sleep(0.5)
        sock.close()

    thread = threading.Thread(target=answer)
    thread.start()
    record = {**left.members[1].record, "data": list(impostor.getsockname())}
    with pytest.raises(RendezvousError, match="whoever answered is not right/0"):
        opener(left).open(dataclasses.replace(left.members[1], record=record), 0, 1)
    thread.join()
    impostor.close()


def test_nobody_listening_is_a_clear_error(two):
    left, _, _ = two
    record = {**left.members[1].record, "data": ["127.0.0.1", reserve_port()]}
    with pytest.raises(RendezvousError, match="cannot open a channel to right/0 at 127.0.0.1"):
        opener(left).open(dataclasses.replace(left.members[1], record=record), 0, 1)


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "selected"),
    [
        ("eth", "eth0", True),
        ("eth0", "eth01", True),
        ("=eth0", "eth01", False),
        ("=eth0", "eth0", True),
        ("ib,eth", "eth0", True),
        ("^docker,lo", "eth0", True),
        ("^docker,lo", "docker0", False),
        ("^=eth0", "eth0", False),
        ("^=eth0", "eth01", True),
        ("wlan", "eth0", False),
    ],
)
def test_interface_selection_follows_nccl(pattern, name, selected):
    assert addresses.matches(pattern, name) == selected


def test_a_loopback_job_listens_on_loopback_only():
    listening, record = channels.listeners(config("left/0", 7000))
    assert record["data"][0] == "127.0.0.1" == listening[0].getsockname()[0]
    for sock in listening:
        sock.close()


def test_a_real_coordinator_never_means_a_loopback_address():
    far = dataclasses.replace(config("left/0", 7000), coordinator=("192.0.2.77", 7000))
    try:
        assert not addresses.local_address(far).startswith("127.")
    except ConfigError as error:  # a machine without a network says so
        assert "no network interface but loopback" in str(error)
    with pytest.raises(ConfigError, match="matches no interface; interfaces here: lo"):
        addresses.local_address(dataclasses.replace(far, socket_ifname="nosuch"))
    with pytest.raises(ConfigError, match="selects only loopback"):
        addresses.local_address(dataclasses.replace(far, socket_ifname="=lo"))


def test_port_ranges_are_kept_and_their_end_is_an_error():
    with addresses.listen_tcp("127.0.0.1", None) as free:
        port = free.getsockname()[1]
    first = addresses.listen_tcp("127.0.0.1", (port, port))
    assert first.getsockname()[1] == port
    with pytest.raises(RendezvousError, match=f"no free port.*HETCCL_PORT_RANGE={port}-{port}"):
        addresses.listen_tcp("127.0.0.1", (port, port))
    first.close()


class _Quiet:
    """An acceptor that accepts nothing."""

    def start(self, hooks: AcceptorHooks) -> None:
        pass

    def close(self) -> None:
        pass

    def join(self) -> None:
        pass


def test_a_channel_that_is_slow_to_take_does_not_hold_up_the_next_handshake():
    """A GPU's slots wait for exchanges, and those may wait for a peer that opens its next channel here."""
    go, added = threading.Event(), []

    class Engine:
        def add_channel(self, **what: object) -> None:
            assert go.wait(10)
            added.append(what["fds"])

    made = Channels(Engine(), None, None, _Quiet(), {}, lambda *_: None)  # type: ignore[arg-type]
    first, second = os.pipe(), os.pipe()
    before = time.monotonic()
    made.opened(CLAIM, list(first), ())
    made.opened(dataclasses.replace(CLAIM, src=3), list(second), ())
    assert time.monotonic() - before < 5 and not added
    made.close()
    go.set()
    made.join()
    assert added == [list(first)]
    os.close(first[0]), os.close(first[1])
    for fd in second:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    third = os.pipe()
    made.opened(dataclasses.replace(CLAIM, src=4), list(third), ())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(third[0])


@pytest.mark.parametrize("closes", [False, True])
def test_only_the_end_of_the_world_may_keep_a_channel_out(closes: bool, caplog: pytest.LogCaptureFixture):
    waits, go, reported = threading.Event(), threading.Event(), []

    class Engine:
        def add_channel(self, **what: object) -> None:
            waits.set()
            assert go.wait(10)
            raise RuntimeError("the world was shut down" if closes else "no memory for the slots")

    made = Channels(Engine(), None, None, _Quiet(), {}, lambda *what: reported.append(what))  # type: ignore[arg-type]
    made.opened(CLAIM, [], ())
    assert waits.wait(10)
    if closes:
        made.close()
    go.set()
    made.join()
    if closes:
        assert not reported and not caplog.records
    else:
        message = "the channel of ranks 2 to 5 could not be set up: no memory for the slots"
        assert reported == [("internal", message)] and [r.getMessage() for r in caplog.records] == [message]
