"""Keys hold in one world, between two members: recordings, other jobs, impostors and zombies get nowhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from meeting import SECRET, Meeting, config, until

from jax_hetccl import _secret
from jax_hetccl._errors import RendezvousError
from jax_hetccl.connect import Channels
from jax_hetccl.launch.ports import reserve_port
from jax_hetccl.rendezvous import channels, coordinator, handshake, keys, messages, sockets
from jax_hetccl.rendezvous.acceptor import Acceptor
from jax_hetccl.rendezvous.handshake import Claim
from jax_hetccl.rendezvous.member import Member

TWO = "left:1,right:1"
THREE = "left:2,right:1"


class Recorder:
    """Passes connections on to a port, and keeps what the clients say."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.said: list[bytearray] = []
        self._socks: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._socks += [client, server]
                said = bytearray()
                self.said.append(said)
                for source, target, kept in ((client, server, said), (server, client, None)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=(source, target, kept)))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if kept is not None:
                    kept += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for sock in (self._listener, *self._socks):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)


def replay(port: int, said: bytes) -> bytes:
    """Says the same to a port; returns the answer."""
    answer = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=1) as sock, contextlib.suppress(OSError):
        # Closing resets the connection, which else would keep the port from the next world for a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(said)
        while data := sock.recv(65536):
            answer += data
    return bytes(answer)


class Engine:
    """Takes channels, as the native engine does."""

    def __init__(self) -> None:
        self.added: list[tuple[int, int]] = []
        self.fds: list[int] = []
        self.came = threading.Event()

    def add_channel(self, **what) -> None:
        self.added.append((what["peer_rank"], what["local_rank"]))
        self.fds += what["fds"]
        self.came.set()

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())


class World:
    """Members of one world with channels. The rank of a member is its index."""

    def __init__(self, clusters: str = TWO, port: int | None = None, ports: tuple[int, int] | None = None, **settings):
        self.meeting = Meeting(port, clusters=clusters, **settings)
        first = config("left/0", self.meeting.port, clusters=clusters, **settings)
        self.engines, self.channels, started, acceptors = {}, {}, {}, {}
        try:
            for name in first.member_names:
                # One range for each member, so that its ports are the same in the next world.
                own = ports and (ports[0] + 10 * len(started), ports[0] + 10 * len(started) + 1)
                mine = config(name, self.meeting.port, clusters=clusters, port_range=own, **settings)
                listening, record = channels.listeners(mine)
                acceptors[name] = Acceptor(listening)
                started[name] = self.meeting.start(name, record, port_range=own)
            for name, future in started.items():
                control = self.meeting.members[name] = future.result(20)
                self.engines[name] = Engine()
                owner = {rank: rank for rank in range(len(started))}
                opener = channels.Opener(dataclasses.replace(mine, transport="tcp"), control)
                self.channels[name] = Channels(
                    self.engines[name], control, opener, acceptors[name], owner, lambda *_: None
                )
        except BaseException:
            for acceptor in acceptors.values():
                acceptor.close()
            raise

    def __getitem__(self, name: str):
        return self.meeting.members[name]

    def close(self) -> None:
        for made in self.channels.values():
            made.close()
        self.meeting.close()
        for made in self.channels.values():
            made.join()
        for engine in self.engines.values():
            engine.close()
        self.meeting.__exit__()


@contextlib.contextmanager
def world(*args, **settings) -> Iterator[World]:
    made = World(*args, **settings)
    try:
        yield made
    finally:
        made.close()


def port_of(member: Member, what: str) -> int:
    return int(member.record["control"].rpartition(":")[2]) if what == "control" else member.record["data"][1]


def free_range() -> tuple[int, int]:
    """Ports for two members; outside of what the kernel gives to connections."""
    for low in range(20000, 30000, 20):
        with contextlib.ExitStack() as held:
            try:
                for port in (low, low + 1, low + 10, low + 11):
                    held.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return low, low + 11
    raise AssertionError("no free ports")


# --- recordings ------------------------------------------------------------------------------------


def test_recordings_of_an_older_world_get_nowhere_in_the_next():
    """Channels and control messages, against the same members at the same ports with the same secret."""
    ports = free_range()
    with world(ports=ports) as old:
        right = old["right/0"].members[1]
        data, control = (Recorder(port_of(right, what)) for what in ("data", "control"))
        through = dataclasses.replace(right, record={**right.record, "data": ["127.0.0.1", data.port]})
        opener = channels.Opener(config("left/0", 1, clusters=TWO, transport="tcp"), old["left/0"])
        for fd in opener.open(through, 0, 1).fds:
            os.close(fd)
        assert old.engines["right/0"].came.wait(5)
        dealer = sockets.client(zmq.Context.instance(), old["left/0"]._joined.keys, right.record["curve"])
        dealer.connect(f"tcp://127.0.0.1:{control.port}")
        # The next number of left/0's stream, as its own connection would send it.
        number = old["left/0"]._links[1]._sent + 1
        dealer.send(messages.pack("DATA", number, messages.pack("recorded", 1), True))
        assert old["right/0"].collect("recorded", [0], 5) == {0: 1}
        dealer.close(0)
        # In the same world they are as worthless.
        for recorder, what in ((data, "data"), (control, "control")):
            assert recorder.said and len(recorder.said[0]) > 100
            replay(port_of(right, what), bytes(recorder.said[0]))
        assert old.engines["right/0"].added == [(0, 1)]
        recordings = {"data": bytes(data.said[0]), "control": bytes(control.said[0])}
        data.close()
        control.close()
    with world(ports=ports) as new:
        heard: list[str] = []
        new["right/0"].subscribe("", lambda _member, key, _value: heard.append(key))
        heard.clear()
        for what, said in recordings.items():
            assert port_of(new["right/0"].members[1], what) == port_of(right, what), "the test needs the same ports"
            answer = replay(port_of(right, what), said)
            assert len(answer) <= (handshake.ANSWER_BYTES if what == "data" else 1024)
        new["left/0"].publish("mine", 1)
        assert new["right/0"].collect("mine", [0], 5) == {0: 1}
        assert heard == ["mine"] and new.engines["right/0"].added == []


def test_a_recorded_join_takes_no_seat():
    """The keys for joining are the same in every world of a job; only CURVE's own are fresh."""
    port = reserve_port()
    serving = coordinator.serve(config("left/0", port, clusters=TWO))
    recorder = Recorder(port)
    try:
        with (
            Meeting(recorder.port, clusters=TWO, coordinator_external=True, join_timeout=1.5) as meeting,
            pytest.raises(RendezvousError, match="never seen"),
        ):
            meeting.start("right/0").result(10)
        assert len(recorder.said[0]) > 300
        assert until(lambda: serving._seats == {}), "who gave up says so without waiting for an answer"
        replay(port, bytes(recorder.said[0]))
        assert serving._seats == {}
    finally:
        recorder.close()
        serving.stop()


# --- other jobs and impostors ------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["the same", "another"])
def test_a_member_of_another_job_opens_no_channel_and_says_nothing(secret):
    """It has the same names and places; it even knows the public keys, which only members learn."""
    with world() as ours, world(secret=SECRET if secret == "the same" else _secret.generate()) as theirs:
        right = ours["right/0"].members[1]
        heard: list[str] = []
        ours["right/0"].subscribe("", lambda _member, key, _value: heard.append(key))
        heard.clear()
        opener = channels.Opener(config("left/0", 1, clusters=TWO, transport="tcp"), theirs["left/0"])
        with pytest.raises(RendezvousError, match="was refused"):
            opener.open(right, 0, 1)
        context = zmq.Context()
        dealer = sockets.client(context, theirs["left/0"]._joined.keys, right.record["curve"])
        dealer.connect(right.record["control"])
        dealer.send(messages.pack("DATA", 2, messages.pack("from another job", 1), True))
        time.sleep(0.5)
        dealer.close(0)
        context.term()
        assert heard == [] and ours.engines["right/0"].added == []


def test_a_member_cannot_pose_as_another():
    """left/1 claims to be left/0, to have its rank, and to speak for it."""
    with world(THREE) as three:
        posing, right = three["left/1"], three["right/0"].members[2]

        def dial(claim: Claim) -> bool:
            with socket.create_connection(tuple(right.record["data"]), timeout=5) as sock:
                dialer = handshake.Dialer(posing.pair_key(2), claim)
                sock.sendall(dialer.hello())
                sock.sendall(dialer.proof(sock.recv(handshake.ANSWER_BYTES, socket.MSG_WAITALL)))
                try:
                    return dialer.check(sock.recv(handshake.PROOF_BYTES, socket.MSG_WAITALL))
                except ConnectionError:
                    return False

        mine = Claim(1, 2, 1, 2, 0, 1, "tcp", bytes(8))
        assert not dial(dataclasses.replace(mine, dialer=0))
        assert not dial(dataclasses.replace(mine, dialer=0, src=0))
        assert not dial(dataclasses.replace(mine, src=0))
        assert not dial(dataclasses.replace(mine, dialer=2))
        assert not dial(dataclasses.replace(mine, dst=1))
        assert three.engines["right/0"].added == []
        assert dial(mine)
        # On the control plane the key says who speaks, whatever name the connection gives itself.
        context = zmq.Context()
        dealer = sockets.client(context, posing._joined.keys, right.record["curve"])
        dealer.routing_id = b"left/0"
        dealer.connect(right.record["control"])
        number = posing._links[2]._sent + 1
        dealer.send(messages.pack("DATA", number, messages.pack("who", 0), True))
        assert three["right/0"].collect("who", [1], 5) == {1: 0}
        assert three["right/0"].published("who", 0) == {}
        dealer.close(0)
        context.term()


def test_keys_for_joining_are_of_one_world_and_one_member():
    made = {
        keys.curve_pair(secret, clusters, name)[0]
        for secret in (SECRET, _secret.generate(), None)
        for clusters in ("left:1,right:1", "left:1,right:2")
        for name in ("left/0", "right/0", keys.COORDINATOR)
    }
    assert len(made) == 3 * 2 * 3


# --- zombies -----------------------------------------------------------------------------------------

ZOMBIE = """
import json, sys, time
from meeting import config
from jax_hetccl.rendezvous import channels
from jax_hetccl.rendezvous.join import join

settings = config("right/0", int(sys.argv[1]), clusters="left:1,right:1", secret=sys.argv[2], transport="tcp")
listening, record = channels.listeners(settings)
control = join(settings, record)
opener = channels.Opener(settings, control)
print(json.dumps("in"), flush=True)
for number in range(100000):
    control.publish(f"zombie/{number}", number)
    try:
        opener.open(control.members[0], 1, 0)
        print(json.dumps("opened"), flush=True)
    except Exception as error:
        print(json.dumps(str(error)), flush=True)
    time.sleep(0.1)
"""


def test_a_zombie_touches_nothing_of_the_new_world():
    """right/0 is stopped; the others form a new world with another right/0 at the same ports; then it goes on."""
    ports = free_range()
    port = reserve_port()
    serving = coordinator.serve(config("left/0", port, clusters=TWO))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    command = [sys.executable, "-c", ZOMBIE, str(port), SECRET]
    zombie = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(json.loads(line) for line in zombie.stdout))  # type: ignore[union-attr]
    reader.start()
    external = {"clusters": TWO, "coordinator_external": True}
    try:
        with Meeting(port, **external) as first:
            own = ports[0], ports[0] + 1
            listening, record = channels.listeners(config("left/0", port, port_range=own))
            left = first.members["left/0"] = first.start("left/0", record, port_range=own).result(20)
            assert left.collect("zombie/0", [1], 10) == {1: 0}
            zombie.send_signal(signal.SIGSTOP)
            for sock in listening:
                sock.close()
            first.close()
        with world(TWO, port, ports, coordinator_external=True, join_timeout=30) as new:
            assert port_of(new["left/0"].members[0], "control") == port_of(left.members[0], "control")
            assert port_of(new["left/0"].members[0], "data") == port_of(left.members[0], "data")
            said = len(lines)
            zombie.send_signal(signal.SIGCONT)
            deadline = time.monotonic() + 20
            while len(lines) < said + 5:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            new["right/0"].publish("mine", 1)
            assert new["left/0"].collect("mine", [1], 5) == {1: 1}
            for member in (0, 1):
                assert new["left/0"].published("zombie/", member) == {}
            new.channels["right/0"].ensure([(1, 0)])
            assert new.engines["left/0"].came.wait(5)
            assert new.engines["left/0"].added == [(1, 0)]
            assert new["left/0"].state_of(1) == "present"
            assert serving._world and serving._world.epoch == new["left/0"].epoch
        assert any("was refused" in line for line in lines[said:]), lines[said:]
        assert "opened" not in lines[said:]
    finally:
        zombie.kill()
        zombie.wait(5)
        reader.join(5)
        zombie.stdout.close()  # type: ignore[union-attr]
        serving.stop()
