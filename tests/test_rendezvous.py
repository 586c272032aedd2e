"""Joining and the control plane, with the real sockets and threads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import zmq
from meeting import SECRET, Meeting, config

from jax_hetccl import _secret
from jax_hetccl._errors import AgreementError, HetcclError, PeerLostError, RendezvousError
from jax_hetccl.launch.ports import reserve_port
from jax_hetccl.rendezvous import addresses, coordinator, keys, messages, sockets, zap
from jax_hetccl.rendezvous.join import join

ALL = ("left/0", "left/1", "right/0")


@pytest.fixture
def meeting():
    with Meeting() as made:
        yield made
    leaked = [t.name for t in threading.enumerate() if t.name.startswith("hetccl")]
    assert not leaked


def refused(future) -> str:
    with pytest.raises(RendezvousError) as caught:
        future.result(30)
    return str(caught.value)


def test_everybody_gets_the_same_world(meeting):
    members = meeting.join(*ALL)
    assert len({m.epoch for m in members}) == 1 and members[0].epoch
    for index, control in enumerate(members):
        assert control.me == index
        assert [m.name for m in control.members] == list(ALL)
        assert [m.record["who"] for m in control.members] == list(ALL)
        assert [(m.cluster, m.process) for m in control.members] == [(0, 0), (0, 1), (1, 0)]


def test_members_may_come_before_the_coordinator(meeting):
    early = [meeting.start("right/0"), meeting.start("left/1")]
    time.sleep(0.7)
    meeting.join("left/0")
    for name, future in zip(("right/0", "left/1"), early, strict=True):
        meeting.members[name] = future.result(20)


def test_missing_members_are_named_to_everybody(meeting):
    waiting = [meeting.start(name, join_timeout=2) for name in ("left/0", "left/1")]
    for future in waiting:
        text = refused(future)
        assert "right/0 (never seen)" in text and "HETCCL_JOIN_TIMEOUT" in text


def test_without_a_coordinator_the_error_says_so(meeting):
    assert "no coordinator there; it is hosted by left/0" in refused(meeting.start("right/0", join_timeout=1))


def test_another_secret_gets_no_answer(meeting):
    waiting = meeting.start("left/0", join_timeout=3)
    stranger = meeting.start("right/0", secret=_secret.generate(), join_timeout=1.5)
    assert "HETCCL_SECRET differs" in refused(stranger)
    assert "right/0 (never seen)" in refused(waiting)


def test_no_secret_is_not_the_secret(meeting):
    waiting = meeting.start("left/0", join_timeout=2.5)
    assert "HETCCL_SECRET differs" in refused(meeting.start("right/0", secret=None, join_timeout=1.5))
    refused(waiting)


def test_other_clusters_are_told_apart_from_another_secret(meeting):
    waiting = meeting.start("left/0", join_timeout=3)
    wrong = meeting.start("right/0", clusters="left:2,right:1,third:1", join_timeout=1.5)
    assert "HETCCL_CLUSTERS must be the same everywhere" in refused(wrong)
    assert "HETCCL_CLUSTERS or the member's place differs" in refused(waiting)


def test_a_name_taken_twice_is_refused_with_its_holder(meeting):
    first, second = meeting.start("left/0", join_timeout=6), meeting.start("left/1", join_timeout=6)
    time.sleep(0.8)
    text = refused(meeting.start("left/1"))
    assert f"left/1 is held by process {os.getpid()} on" in text
    third = meeting.start("right/0")  # the holders are not disturbed
    for name, future in zip(ALL, (first, second, third), strict=True):
        meeting.members[name] = future.result(20)
    assert "left/1 is held by" in refused(meeting.start("left/1"))


class RawMember:
    """A member that has the right key but sends what the test wants."""

    def __init__(self, port: int, name: str) -> None:
        mine = config(name, port)
        pair = keys.curve_pair(SECRET, coordinator.world_identity(mine), name)
        self._context = zmq.Context()
        self._socket = sockets.client(self._context, pair, keys.curve_pair(SECRET, "", keys.COORDINATOR)[0])
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def ask(self, data: bytes) -> list:
        self._socket.send(data)
        return self.answer()

    def answer(self) -> list:
        assert self._socket.poll(5000)
        fields = messages.unpack(self._socket.recv())
        assert fields
        return fields

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


def test_another_protocol_is_refused(meeting):
    waiting = meeting.start("left/0", join_timeout=2)
    old = RawMember(meeting.port, "right/0")
    answer = old.ask(messages.pack("JOIN", messages.PROTOCOL + 98, b"x" * 16, {}))
    says = f"right/0 speaks protocol {messages.PROTOCOL + 98}"
    assert answer[0] == "REFUSED" and f"{says}, the coordinator speaks {messages.PROTOCOL}" in answer[1]
    assert f"right/0 (refused: {says}" in refused(waiting)
    old.close()


def test_the_name_is_the_keys_not_the_messages(meeting):
    """Whatever a member claims, it takes only the seat that its key stands for."""
    waiting = meeting.start("left/0", join_timeout=2.5)
    raw = RawMember(meeting.port, "right/0")
    claim = messages.pack("JOIN", messages.PROTOCOL, b"x" * 16, {"holder": "left/1", "name": "left/1"})
    time.sleep(0.5)
    assert raw.ask(claim) == ["WAIT", ["left/1 (never seen)"]]
    raw.close()
    assert "left/1 (never seen)" in refused(waiting)


MALFORMED = (
    b"",
    b"\xc1",
    b"\x91" * 5000,
    messages.pack(5),
    messages.pack("JOIN"),
    messages.pack("JOIN", 1, 2, 3),
    messages.pack("ALIVE", None, "x", []),
    messages.pack("LEAVE"),
    messages.pack("NO_SUCH_THING"),
)


def test_malformed_requests_do_not_disturb_the_coordinator():
    port = reserve_port()
    alone = coordinator.serve(config("left/0", port))
    raw = RawMember(port, "right/0")
    for data in MALFORMED:
        raw.send(data)
    raw.send(messages.pack("JOIN", messages.PROTOCOL, b"x" * 16, {}))
    while (answer := raw.answer())[0] == "REFUSED":
        pass
    assert answer == ["WAIT", ["left/0 (never seen)", "left/1 (never seen)"]]
    raw.close()
    alone.stop()


def test_the_coordinator_may_die_and_come_back():
    port = reserve_port()
    first = coordinator.serve(config("left/0", port))
    with Meeting(port) as meeting:
        left, _, right = meeting.join(*ALL)
        first.stop()
        left.publish("step", 1)
        assert right.collect("step", [0], 5) == {0: 1}
        second = coordinator.serve(config("left/0", port))
        time.sleep(2.5)  # members tell the new one who holds which name
        assert "left/1 is held by" in refused(meeting.start("left/1"))
        assert right.collect("step", [0], 1) == {0: 1}
    second.stop()


def test_a_second_coordinator_on_the_port_is_an_error():
    port = reserve_port()
    first = coordinator.serve(config("left/0", port))
    with pytest.raises(RendezvousError, match="is another coordinator running there"):
        coordinator.serve(config("left/0", port))
    first.stop()


def test_the_next_world_is_another_one_and_old_keys_do_not_fit(meeting):
    before = meeting.join(*ALL)
    old_epoch, old_key = before[0].epoch, before[0].pair_key(2)
    meeting.close()
    after = meeting.join(*ALL)
    assert after[0].epoch != old_epoch and after[0].pair_key(2) != old_key


def test_pair_keys_are_shared_by_two_and_no_third(meeting):
    a, b, c = meeting.join(*ALL)
    assert a.pair_key(1) == b.pair_key(0) and a.pair_key(2) == c.pair_key(0)
    assert len({a.pair_key(1), a.pair_key(2), b.pair_key(2)}) == 3


def test_messages_arrive_completely_and_in_order(meeting):
    members = meeting.join(*ALL)
    seen: list[tuple[int, int]] = []
    members[2].subscribe("n/", lambda sender, key, value: seen.append((sender, value)))
    for value in range(500):
        for control in members[:2]:
            control.publish(f"n/{value}", value)
    members[2].collect("n/499", [0, 1], 10)
    time.sleep(0.1)
    for sender in (0, 1):
        assert [v for s, v in seen if s == sender] == list(range(500))


def test_messages_survive_broken_connections(meeting):
    """Every connection to right/0 is cut again and again; nothing is lost or doubled."""
    left, _, right = meeting.join(*ALL)
    seen: list[int] = []
    right.subscribe("n/", lambda _sender, _key, value: seen.append(value))
    port = int(right.members[2].record["control"].rpartition(":")[2])
    cut = 0
    for value in range(300):
        left.publish(f"n/{value}", value)
        if value % 60 == 30:
            cut += cut_connections(port)
            time.sleep(0.05)
    right.collect("n/299", [0], 10)
    time.sleep(0.2)
    assert seen == list(range(300))
    assert cut >= 5 and left.state_of(2) == "present"


def cut_connections(port: int) -> int:
    """Breaks every TCP connection of this process whose far end is `port`; returns how many."""
    cut = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue
        try:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getpeername()[1] == port:
                sock.shutdown(socket.SHUT_RDWR)
                cut += 1
        except OSError:
            pass
        finally:
            sock.close()
    return cut


def test_values_published_early_are_handed_to_late_subscribers(meeting):
    left, _, right = meeting.join(*ALL)
    left.publish("early", {"a": [1, 2], "b": b"x"})
    right.collect("early", [0], 5)
    got = []
    right.subscribe("ear", lambda *args: got.append(args))
    assert got == [(0, "early", {"a": [1, 2], "b": b"x"})]


def test_collect_names_who_is_missing(meeting):
    left, middle, _ = meeting.join(*ALL)
    middle.publish("mesh", 1)
    with pytest.raises(RendezvousError, match="waited 0 s for 'mesh' from left/0, right/0"):
        left.collect("mesh", timeout=0.3)


def test_a_goodbye_is_no_loss_but_ends_waiting(meeting):
    left, _, _ = meeting.join(*ALL)
    losses = []
    left.on_lost(lambda member, why: losses.append(member))
    meeting.close("right/0")
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=r"'mesh': right/0 \(has shut down\)"):
        left.collect("mesh", [2], 10)
    assert time.monotonic() - start < 2
    time.sleep(1.5)
    assert not losses and left.state_of(2) == "departed"


def test_interrupt_ends_all_waiting(meeting):
    left, *_ = meeting.join(*ALL)
    threading.Timer(0.2, left.interrupt, [PeerLostError("the first error")]).start()
    with pytest.raises(PeerLostError, match="the first error") as first:
        left.collect("never", timeout=10)
    with pytest.raises(PeerLostError, match="the first error") as second:
        left.collect("never", timeout=10)
    assert first.value is not second.value  # each with its own traceback


def test_closed_control_plane_refuses_to_publish(meeting):
    left, *_ = meeting.join(*ALL)
    meeting.close("left/0")
    with pytest.raises(HetcclError, match="shut down"):
        left.publish("x", 1)
    left.close()


CHILD = """
import sys, time
from meeting import config
from jax_hetccl.rendezvous.join import join
control = join(config("right/0", int(sys.argv[1]), secret=sys.argv[2]))
print(control.epoch, flush=True)
time.sleep(60)
"""


def child(port: int) -> subprocess.Popen[str]:
    here = os.path.dirname(__file__)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    command = [sys.executable, "-c", CHILD, str(port), SECRET]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_is_noticed_and_may_join_the_next_world():
    port = reserve_port()
    alone = coordinator.serve(config("left/0", port))
    process = child(port)
    try:
        with Meeting(port) as meeting:
            left, _ = meeting.join("left/0", "left/1")
            assert int(process.stdout.readline()) == left.epoch  # type: ignore[union-attr]
            noticed = threading.Event()
            left.on_lost(lambda member, why: noticed.set() if member == 2 else None)
            start = time.monotonic()
            process.send_signal(signal.SIGKILL)
            assert noticed.wait(4) and time.monotonic() - start < 2.5
            late: list[int] = []
            left.on_lost(lambda member, why: late.append(member))
            assert late == [2], "who asks later must be told too"
            with pytest.raises(PeerLostError, match="right/0.*died or became unreachable"):
                left.collect("anything", [2], 10)
            old = left.epoch
            meeting.close()
            process.wait(5)
            process.stdout.close()  # type: ignore[union-attr]
            process = child(port)
            left, _ = meeting.join("left/0", "left/1")
            assert int(process.stdout.readline()) == left.epoch != old  # type: ignore[union-attr]
    finally:
        process.kill()
        process.wait(5)
        process.stdout.close()  # type: ignore[union-attr]
        alone.stop()


def test_a_stopped_process_is_not_lost():
    port = reserve_port()
    alone = coordinator.serve(config("left/0", port))
    process = child(port)
    try:
        with Meeting(port) as meeting:
            left, _ = meeting.join("left/0", "left/1")
            process.send_signal(signal.SIGSTOP)
            left.publish("while", "stopped")
            time.sleep(6)  # longer than the kernel's probes take
            assert left.state_of(2) == "present"
            process.send_signal(signal.SIGCONT)
            time.sleep(1.5)
            assert left.state_of(2) == "present"
    finally:
        process.kill()
        process.wait(5)
        process.stdout.close()  # type: ignore[union-attr]
        alone.stop()


def test_nothing_is_left_after_many_worlds(meeting):
    meeting.join(*ALL)
    meeting.close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        meeting.join(*ALL)
        meeting.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6():
    with Meeting(host="::1") as meeting:
        left, *_ = meeting.join(*ALL)
        assert all(m.record["control"].startswith("tcp://[::1]:") for m in left.members)


def real_address() -> str | None:
    return next((a for _, a in addresses.interfaces() if not a.startswith("127.") and ":" not in a), None)


@pytest.mark.skipif(real_address() is None, reason="this machine has only loopback")
def test_beyond_loopback_nobody_tells_a_loopback_address():
    with Meeting(host=real_address()) as meeting:
        left, *_ = meeting.join(*ALL)
        assert {m.record["control"].rpartition(":")[0] for m in left.members} == {f"tcp://{real_address()}"}


@pytest.mark.skipif(real_address() is None, reason="this machine has only loopback")
def test_a_host_name_that_means_loopback_here_means_our_real_address(monkeypatch):
    """As with `127.0.1.1 myhost` in /etc/hosts: the others could not use it."""
    lookup = socket.getaddrinfo

    def own_name_is_loopback(host, *rest, **more):
        return lookup("127.0.1.1" if host == "myhost" else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", own_name_is_loopback)
    with Meeting(host="myhost") as meeting:
        left, *_ = meeting.join(*ALL)
        assert {m.record["control"].rpartition(":")[0] for m in left.members} == {f"tcp://{real_address()}"}


@pytest.mark.parametrize("door", ["coordinator", "member"])
@pytest.mark.parametrize("stranger", ["plain", "junk", "unknown key"])
def test_strangers_get_no_answer_and_disturb_nobody(meeting, door, stranger):
    left, _, right = meeting.join(*ALL)
    where = f"tcp://127.0.0.1:{meeting.port}" if door == "coordinator" else left.members[2].record["control"]
    server_key = keys.curve_pair(SECRET, "", keys.COORDINATOR)[0]
    if door == "member":
        server_key = left.members[2].record["curve"]
    heard = []
    right.subscribe("", lambda *args: heard.append(args))
    heard.clear()
    if stranger == "junk":
        with socket.create_connection(("127.0.0.1", int(where.rpartition(":")[2])), timeout=2) as sock:
            sock.sendall(os.urandom(4096))
            answer = b""
            try:
                while chunk := sock.recv(4096):
                    answer += chunk
            except OSError:
                pass
            assert len(answer) <= 64  # ZeroMQ's public greeting
    else:
        context = zmq.Context()
        if stranger == "plain":
            sock = context.socket(zmq.DEALER)
        else:
            sock = sockets.client(context, zmq.curve_keypair(), server_key)
        sock.linger = 0
        sock.connect(where)
        sock.send(messages.pack("JOIN", messages.PROTOCOL, b"x" * 16, {}))
        sock.send(messages.pack("DATA", 1, messages.pack("evil", 1)))
        assert not sock.poll(700)
        sock.close()
        context.term()
    left.publish("still", "alive")
    assert right.collect("still", [0], 5) == {0: "alive"}
    assert all(key == "still" for _, key, _ in heard)


@pytest.mark.parametrize("gate", ["closed", "never there"])
def test_without_a_gate_nobody_is_admitted(gate):
    context, pair = zmq.Context(), zmq.curve_keypair()
    if gate == "closed":
        zap.Gate(context).close()
    server = sockets.server(context, pair)
    port = sockets.bind_free(server, "127.0.0.1", None)
    theirs = zmq.Context()  # a gate of the stranger's own context plays no part
    stranger = sockets.client(theirs, zmq.curve_keypair(), pair[0])
    stranger.connect(f"tcp://127.0.0.1:{port}")
    stranger.send(b"let me in")
    assert not server.poll(700)
    for sock in (stranger, server):
        sock.close(0)
    context.term()
    theirs.term()


def test_settings_that_must_be_equal_are_compared(meeting):
    started = [meeting.start(n, {"agree": {"HETCCL_BUCKET_MB": b}}) for n, b in zip(ALL, (4, 4, 8), strict=True)]
    for future in started:
        with pytest.raises(AgreementError, match="HETCCL_BUCKET_MB is 4 in left/0 but 8 in right/0"):
            future.result(20)


def test_one_member_alone(meeting):
    control = join(config("solo/0", meeting.port, clusters="solo:1"))
    control.publish("x", 1)
    assert control.collect("x", timeout=1) == {0: 1}
    control.close()
