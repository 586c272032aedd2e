"""Opening rdma channels, with an engine that plays the queue pairs: who is tried, what is said, and nobody is starved."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from meeting import Meeting, config, until

from jax_hetccl._errors import RendezvousError
from jax_hetccl.connect import Channels, rdma_options
from jax_hetccl.rdma.ports import Gid, Port
from jax_hetccl.rendezvous import channels, setups
from jax_hetccl.rendezvous.acceptor import Acceptor
from jax_hetccl.routes import Equipment, Routes

NAMES = ("left/0", "right/0")
ELSEWHERE = "another host, or shared memory would win"


def port(device: str, why_not: str = "") -> Port:
    return Port(
        device,
        1,
        "ACTIVE",
        "Ethernet",
        "InfiniBand",
        4096,
        100.0,
        0,
        Gid(1, "::ffff:10.0.0.1", "RoCE v2"),
        why_not=why_not,
    )


class Engine:
    """Plays the native engine: an rdma channel works if both ends say so over its stream, the dialer last.

    Args:
      broken: why this end's queue pairs do not work.
      silent: whether it says nothing at all, as over a network that swallows its packets.
    """

    PATIENCE = 1.0

    def __init__(self, broken: str = "", silent: bool = False) -> None:
        self.broken, self.silent = broken, silent
        self.added: dict[tuple[int, int, bool], tuple[str, Any]] = {}
        self.tried = 0
        self.fds: list[int] = []
        self.lock = threading.Lock()

    def add_channel(self, *, local_rank, peer_rank, outgoing, transport, fds, rdma=None) -> None:
        if transport == "rdma":
            with self.lock:
                self.tried += 1
            stream = socket.socket(fileno=fds[0])
            stream.settimeout(self.PATIENCE)
            with contextlib.ExitStack() as undo:
                undo.enter_context(stream)
                self._agree(stream, outgoing)
                undo.pop_all()
                fds = [stream.detach()]
        key = local_rank, peer_rank, outgoing
        with self.lock:
            if key in self.added:
                raise RuntimeError("hetccl: there is such a channel already")
            self.added[key] = transport, rdma
            self.fds += fds

    def _agree(self, stream: socket.socket, outgoing: bool) -> None:
        if self.broken:
            raise RuntimeError(f"hetccl: {self.broken}")
        if self.silent:
            time.sleep(self.PATIENCE)
            raise RuntimeError("hetccl: no packet came")
        try:
            for mine in (outgoing, not outgoing, outgoing):
                if mine:
                    stream.sendall(b"q")
                elif stream.recv(1) != b"q":
                    raise RuntimeError("hetccl: the other end gave up")
        except OSError as error:
            raise RuntimeError(f"hetccl: the other end does not answer: {error}") from None

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class World:
    """Both members in this process, each with channels of its own."""

    def __init__(self, ports: dict[str, list[Port]], engines: dict[str, Engine], boot: str, **settings: Any) -> None:
        self.meeting = Meeting(clusters="left:1,right:1")
        self.engines = engines
        self.channels: dict[str, Channels] = {}
        acceptors, started = {}, {}
        for name in NAMES:
            listening, record = channels.listeners(config(name, self.meeting.port))
            acceptors[name] = Acceptor(listening)
            mine = [p.record() for p in ports[name]]
            record |= {
                "boot": boot and f"{boot} {name}",
                "rdma": {"ports": mine, "missing": "" if mine else "no RDMA device"},
            }
            started[name] = self.meeting.start(name, record)
        # Four ranks each, so that several channels are opened at once.
        owner = {rank: rank // 4 for rank in range(8)}
        for name in NAMES:
            control = self.meeting.members[name] = started[name].result(20)
            routes = Routes(control.members, owner, {i: [[6] * len(ports[NAMES[i]])] * 4 for i in range(2)})
            own = config(name, self.meeting.port, clusters="left:1,right:1", **settings)
            usable = {i: rdma_options(own, p) for i, p in enumerate(routes.ports(control.me)) if not p.why_not}
            opener = channels.Opener(own, control, routes.link)
            self.channels[name] = Channels(
                engines[name], control, opener, acceptors[name], owner, lambda *_: None, segment, ports=usable
            )

    def close(self) -> None:
        for each in self.channels.values():
            each.close()
        for engine in self.engines.values():
            engine.close()
        for each in self.channels.values():
            each.join()
        self.meeting.__exit__()


def segment(nbytes: int, slots: int) -> list[int]:
    memory = os.memfd_create("ring")
    os.ftruncate(memory, nbytes * slots)
    return [memory]


@pytest.fixture
def start() -> Iterator[Any]:
    made: list[World] = []

    def go(left="rxe0", right="rxe1", engines=None, boot=ELSEWHERE, **settings) -> World:
        ports = {"left/0": [port(left)] if isinstance(left, str) else left}
        ports["right/0"] = [port(right)] if isinstance(right, str) else right
        made.append(World(ports, engines or {n: Engine() for n in NAMES}, boot, **settings))
        return made[-1]

    yield go
    for world in made:
        world.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("hetccl-setup")]


PAIRS = [(a, b) for a in range(4) for b in range(4, 8)]
BACK = [(b, a) for a, b in PAIRS]


def test_auto_takes_rdma_between_hosts_and_tells_the_engine_of_both_ports(start):
    world = start(ib_tc=106, ib_timeout=18, ib_retry_cnt=3, ib_odp=True)
    world.channels["left/0"].ensure(PAIRS)
    assert set(world.channels["left/0"].transports().values()) == {"rdma"}
    assert until(lambda: len(world.channels["right/0"].transports()) == len(PAIRS))
    expected = {
        "port": 1,
        "gid_index": 1,
        "traffic_class": 106,
        "timeout": 18,
        "retry_count": 3,
        "on_demand_paging": True,
    }
    assert world.engines["left/0"].added[0, 4, True] == ("rdma", {"device": "rxe0", **expected})
    assert world.engines["right/0"].added[4, 0, False] == ("rdma", {"device": "rxe1", **expected})


def test_both_sides_open_to_each_other_at_once(start):
    world = start()
    threads = [threading.Thread(target=world.channels[n].ensure, args=(PAIRS + BACK,)) for n in NAMES]
    began = time.monotonic()
    [t.start() for t in threads]
    [t.join(20) for t in threads]
    assert time.monotonic() - began < 5
    for name in NAMES:
        assert until(lambda: len(world.channels[name].transports()) == len(PAIRS + BACK))
        assert set(world.channels[name].transports().values()) == {"rdma"}


def test_one_host_takes_shared_memory(start):
    world = start(boot="")
    # The records say the same host only if the system says which one it is: the real one does.
    for name in NAMES:
        for member in world.meeting.members[name].members:
            member.record["boot"] = channels.boot_id()
    world.channels["left/0"].ensure(PAIRS[:1])
    assert world.channels["left/0"].transports() == {(0, 4): "shm"}
    assert not world.engines["left/0"].tried


@pytest.mark.parametrize("side", NAMES)
@pytest.mark.parametrize("fault", ["broken", "silent"])
def test_queue_pairs_that_do_not_work_mean_tcp_and_one_warning(start, caplog, side, fault):
    engines = {n: Engine() for n in NAMES}
    engines[side] = Engine("", silent=True) if fault == "silent" else Engine("cannot register memory")
    world = start(engines=engines)
    with caplog.at_level(logging.DEBUG):
        world.channels["left/0"].ensure(PAIRS[:1])
        world.channels["left/0"].ensure(PAIRS)
    assert set(world.channels["left/0"].transports().values()) == {"tcp"}
    assert until(lambda: len(world.channels["right/0"].transports()) == len(PAIRS))
    assert set(world.channels["right/0"].transports().values()) == {"tcp"}
    told = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(told) == 1 and "no rdma between left/0 and right/0 (rxe0:1 here, rxe1:1 there: " in told[0]
    assert world.engines["left/0"].tried == 1, "ports that do not work are not tried again"


def test_forced_rdma_that_does_not_work_names_the_peer_both_ports_and_the_reason(start):
    world = start(engines={"left/0": Engine("transport retry counter exceeded"), "right/0": Engine()}, transport="rdma")
    for _ in range(2):
        with pytest.raises(RendezvousError) as caught:
            world.channels["left/0"].ensure(PAIRS[:1])
        assert str(caught.value) == (
            "HETCCL_TRANSPORT=rdma, but rxe0:1 of left/0 and rxe1:1 of right/0 do not work together: "
            "transport retry counter exceeded"
        )
    world.engines["left/0"].broken = ""
    assert until(lambda: not world.channels["right/0"]._being_set_up)
    world.channels["left/0"].ensure(PAIRS[:1])
    assert world.channels["left/0"].transports() == {(0, 4): "rdma"}


def test_forced_rdma_goes_over_rdma_on_one_host_too(start):
    world = start(boot="", transport="rdma")
    world.channels["left/0"].ensure(PAIRS[:1])
    assert world.channels["left/0"].transports() == {(0, 4): "rdma"}


def test_forced_rdma_without_ports_says_who_has_none(start):
    world = start(right=[], transport="rdma")
    with pytest.raises(
        RendezvousError, match=r"left/0 and right/0 have no ports for it: right/0 has no usable port \(no RDMA"
    ):
        world.channels["left/0"].ensure(PAIRS[:1])


@pytest.mark.parametrize(
    ("right", "level"),
    [([], logging.DEBUG), ([port("rxe1", "it is DOWN")], logging.WARNING)],
    ids=["no device", "a port that is down"],
)
def test_auto_without_ports_is_silent_unless_somebody_may_expect_rdma(start, caplog, right, level):
    world = start(right=right)
    with caplog.at_level(logging.DEBUG, logger="jax_hetccl"):
        world.channels["left/0"].ensure(PAIRS)
    told = [r for r in caplog.records if "no rdma between" in r.getMessage()]
    assert [r.levelno for r in told] == [level]
    assert set(world.channels["left/0"].transports().values()) == {"tcp"}


def dialer(world: World) -> tuple[channels.Opener, Routes]:
    """What left/0 opens channels with, apart from its engine."""
    control = world.meeting.members["left/0"]
    distances = {m.index: [[6] * len(m.record["rdma"]["ports"])] * 4 for m in control.members}
    opener = channels.Opener(config("left/0", 1, clusters="left:1,right:1"), control)
    return opener, Routes(control.members, {rank: rank // 4 for rank in range(8)}, distances)


def dial(world: World, pairs: list[tuple[int, int]]) -> list[int]:
    """Opens the streams of rdma channels and then says nothing over them."""
    opener, routes = dialer(world)
    peer = world.meeting.members["left/0"].members[1]
    return [fd for src, dst in pairs for fd in opener._open_rdma(peer, src, dst, routes.link(src, dst))]


def test_peers_that_do_not_answer_starve_nobody(start):
    """Set-ups that hang hold only their own threads, and what waits for a thread is not taken for broken."""
    world = start()
    hanging = dial(world, PAIRS[: setups.THREADS - 1])
    began = time.monotonic()
    world.channels["left/0"].ensure(PAIRS[-1:])
    assert time.monotonic() - began < Engine.PATIENCE / 2
    assert world.channels["left/0"].transports() == {PAIRS[-1]: "rdma"}
    for fd in hanging:
        os.close(fd)


def test_more_channels_than_threads_wait_without_giving_up(start, monkeypatch):
    monkeypatch.setattr(setups, "THREADS", 1)
    world = start(engines={"left/0": Engine(), "right/0": Slow()})
    world.channels["left/0"].ensure(PAIRS)
    assert set(world.channels["left/0"].transports().values()) == {"rdma"}


class Slow(Engine):
    """Needs a quarter of the patience for each channel."""

    def _agree(self, stream: socket.socket, outgoing: bool) -> None:
        time.sleep(self.PATIENCE / 4)
        super()._agree(stream, outgoing)


def test_closing_ends_what_is_being_set_up(start):
    world = start()
    fds = dial(world, PAIRS)
    began = time.monotonic()
    world.channels["right/0"].close()
    assert time.monotonic() - began < Engine.PATIENCE / 2
    for fd in fds:
        os.close(fd)


class Held(Engine):
    """Waits for a section of a GPU, which its close ends and not the stream's end."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = threading.Event()

    def _agree(self, stream: socket.socket, outgoing: bool) -> None:
        self.closed.wait(20)
        raise RuntimeError("hetccl: the world was shut down")

    def close(self) -> None:
        self.closed.set()
        super().close()


def test_closing_does_not_wait_for_what_only_the_engine_ends(start):
    held = Held()
    world = start(engines={"left/0": Engine(), "right/0": held})
    fds = dial(world, PAIRS[:1])
    assert until(lambda: held.tried == 1)
    began = time.monotonic()
    world.channels["right/0"].close()
    assert time.monotonic() - began < Engine.PATIENCE / 2
    assert not held.closed.is_set()
    held.close()
    world.channels["right/0"].join()
    assert not world.channels["right/0"]._being_set_up
    for fd in fds:
        os.close(fd)


def test_a_port_that_is_not_there_is_refused(start):
    world = start(right=[port("rxe9", "it is DOWN"), port("rxe1")])
    opener, routes = dialer(world)
    good = routes.link(0, 4)
    assert good.theirs.index == 1
    for index in (0, 2):
        wrong = dataclasses.replace(good, theirs=dataclasses.replace(good.theirs, index=index))
        with pytest.raises(RendezvousError, match="was refused"):
            opener._open_rdma(world.meeting.members["left/0"].members[1], 0, 4, wrong)


def test_settings_that_leave_no_use_for_rdma_look_at_nothing():
    found = Equipment.of(config("left/0", 1, clusters="left:1,right:1", transport="tcp")).record()
    assert found == {"ports": [], "missing": "HETCCL_TRANSPORT=tcp"}
