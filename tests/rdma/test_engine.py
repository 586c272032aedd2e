"""One engine over software RDMA: against an end written with pyverbs, and against faults of the network."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import lab
import numpy as np
import pytest
from native_calls import (
    EPOCH,
    HEADER,
    add_plan,
    check,
    current_engine,
    empty_chain,
    header,
    swap,
    swap_and_check,
)

from harness.process import IN_PLACE
from jax_hetccl import _native

BOUND_S = 3.0


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[_native.Engine]:
    """The current engine: rank 0. Its parameter is the bound of every wait, in seconds."""
    bound = getattr(request, "param", 20.0)
    with current_engine(timeout_s=bound, arrival_timeout_s=bound) as made:
        yield made


@pytest.fixture
def later() -> Iterator[Callable[..., concurrent.futures.Future[Any]]]:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield pool.submit


def add(engine: _native.Engine, outgoing: bool, sock: socket.socket, device: str = "rxe0", **changes: Any) -> None:
    engine.add_channel(
        local_rank=0, peer_rank=1, outgoing=outgoing, transport="rdma", fds=[sock.detach()],
        rdma=lab.options(device, **changes),
    )  # fmt: skip


def connect(engine: _native.Engine, outgoing: bool, make: Callable[..., Any]) -> Any:
    """Connects a channel of the engine with an end that `make` makes for a stream, on rxe1; returns that end."""
    ours, theirs = socket.socketpair()
    end = make(theirs, "rxe1", 1)
    mine, peer = lab.both(lambda: add(engine, outgoing, ours), end.connect)
    assert mine is None and peer is None, (mine, peer)
    return end


def failed(engine: _native.Engine, within: float) -> _native.Failure:
    began = time.monotonic()
    failure = engine.wait_failure(within)
    assert failure is not None, f"no failure within {time.monotonic() - began:.1f} s"
    return failure


def test_a_pyverbs_peer_moves_messages_of_all_sizes_both_ways(engine, pyverbs_peer, later) -> None:
    inbox = connect(engine, True, pyverbs_peer.Receiver)
    outbox = connect(engine, False, pyverbs_peer.Sender)
    for plan, count in enumerate((10, 1500, 20_000, 400_000), 1):
        x = np.arange(count, dtype=np.float32)
        add_plan(engine, x.nbytes, plan)
        program = jax.jit(lambda x: check(*swap(x, empty_chain(), plan)))
        for run in range(2):
            result = later(lambda: np.asarray(program(x)))
            head, payload = inbox.message()
            assert HEADER.unpack(head)[12].rstrip(b"\0") == b"psum/data test" and payload == x.tobytes()
            outbox.send(header(x.nbytes, occurrence=HEADER.unpack(head)[7]), (3 * x).tobytes())
            np.testing.assert_array_equal(result.result(20), 3 * x, err_msg=f"{count} elements, run {run}")
    assert engine.failure() is None
    assert outbox.direct_bytes >= 2 * 1_600_000, "large messages go into the memory that the engine grants"
    routed = {(c["outgoing"], c["device"], c["port"]) for c in engine.stats()["routed"]}
    assert routed == {(True, "rxe0", 1), (False, "rxe0", 1)}
    pyverbs_peer.say_goodbye(outbox)
    pyverbs_peer.say_goodbye(inbox)


def test_a_peer_that_dies_is_noticed_at_once(engine, pyverbs_peer, later) -> None:
    inbox = connect(engine, True, pyverbs_peer.Receiver)
    outbox = connect(engine, False, pyverbs_peer.Sender)
    x = np.ones(4, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: np.asarray(swap_and_check(x)))
    inbox.message()
    began = time.monotonic()
    outbox.close()
    inbox.close()
    failure = failed(engine, 5)
    assert failure.kind == "peer_lost" and "right/0 rank 1" in failure.message
    assert time.monotonic() - began < 2
    assert result.exception(20) is not None


@pytest.mark.parametrize("engine", [BOUND_S], indirect=True)
@pytest.mark.parametrize("interface", ["vethA", "vethB"])
def test_a_lost_link_ends_what_is_under_way(engine, pyverbs_peer, later, interface) -> None:
    """The own one at once, with the device and the reason; the peer's at the latest when the time is up."""
    inbox = connect(engine, True, pyverbs_peer.Receiver)
    outbox = connect(engine, False, pyverbs_peer.Sender)
    x = np.ones(4, np.float32)
    add_plan(engine, x.nbytes)
    lab.turn(interface, "down")
    began = time.monotonic()
    result = later(lambda: np.asarray(swap_and_check(x)))
    failure = failed(engine, 3 * BOUND_S)
    assert "right/0 rank 1" in failure.message
    if interface == "vethA":
        assert "rxe0" in failure.message and time.monotonic() - began < BOUND_S / 2, failure.message
    else:
        assert time.monotonic() - began < 2 * BOUND_S, failure.message
    assert result.exception(20) is not None
    outbox.close()
    inbox.close()


def test_a_grant_with_a_wrong_key_is_an_access_error(engine, pyverbs_peer, later) -> None:
    """The engine writes where the peer says; the peer's NIC refuses."""
    inbox = connect(engine, True, pyverbs_peer.Grantor)
    outbox = connect(engine, False, pyverbs_peer.Sender)
    x = np.ones(400_000, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: np.asarray(swap_and_check(x)))
    inbox.grant_with_a_wrong_key(x.nbytes)
    failure = failed(engine, 10)
    assert "rxe0" in failure.message and "remote access" in failure.message, failure.message
    assert result.exception(20) is not None
    outbox.close()
    inbox.close()


def test_a_wrong_key_in_the_handshake_means_no_channel(engine, pyverbs_peer) -> None:
    ours, theirs = socket.socketpair()
    end = pyverbs_peer.Receiver(theirs, "rxe1", 1)
    end.mine.rkey ^= 0x5500
    mine, peer = lab.both(lambda: add(engine, True, ours), end.connect)
    assert isinstance(mine, RuntimeError) and "rxe0" in str(mine) and "remote access" in str(mine), mine
    assert isinstance(peer, Exception)
    end.close()


def test_a_peer_that_refuses_says_why(engine, pyverbs_peer) -> None:
    ours, theirs = socket.socketpair()
    record = pyverbs_peer.Record(2, 1, 2, 0, 0, bytes(16), 0, 0, error=1, text=b"no memory is left")
    mine, _ = lab.both(lambda: add(engine, True, ours), lambda: theirs.sendall(record.pack()))
    assert isinstance(mine, RuntimeError) and "no memory is left" in str(mine)
    theirs.close()


def test_a_peer_that_fails_last_leaves_no_channel_on_either_side(engine, pyverbs_peer) -> None:
    """The sender does not say that the channel is there before the receiver has."""
    ours, theirs = socket.socketpair()
    end = pyverbs_peer.Receiver(theirs, "rxe1", 1)

    def fail_behind_the_probe() -> bytes:
        end.probe(end.mine.slots + pyverbs_peer.GRANTS + 1)
        theirs.settimeout(0.3)
        with pytest.raises(TimeoutError):
            theirs.recv(1)
        theirs.settimeout(pyverbs_peer.WAIT_S)
        theirs.sendall(b"F\x11no copier is left")
        return theirs.recv(1)

    mine, said = lab.both(lambda: add(engine, True, ours), fail_behind_the_probe)
    assert isinstance(mine, RuntimeError) and "at the peer: no copier is left" in str(mine), mine
    assert said == b"", said
    end.close()


def test_ports_that_do_not_reach_each_other_are_found_out(engine) -> None:
    """Both ends get the reason, within the bound."""
    other = _native.Engine(epoch=EPOCH)
    other.set_local_device(0, 1)
    ours, theirs = socket.socketpair()
    lab.turn("vethB", "down")
    began = time.monotonic()
    errors = lab.both(
        lambda: add(engine, True, ours),
        lambda: other.add_channel(
            local_rank=1, peer_rank=0, outgoing=False, transport="rdma", fds=[theirs.detach()], rdma=lab.options("rxe1")
        ),
    )
    assert time.monotonic() - began < 21
    other.close(5.0)
    for error in errors:
        assert isinstance(error, RuntimeError) and ("rxe0" in str(error) or "rxe1" in str(error)), error


def test_a_device_that_is_not_there(engine) -> None:
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(RuntimeError, match="mlx5_9"):
        add(engine, True, ours, "mlx5_9")


_LOCKED = """
import json, sys
import lab
from jax_hetccl import _native
import socket
engines = [_native.Engine(epoch=1), _native.Engine(epoch=1)]
pair = socket.socketpair()
def add(i):
    engines[i].set_local_device(0, i)
    engines[i].add_channel(local_rank=i, peer_rank=1 - i, outgoing=i == 0, transport="rdma", fds=[pair[i].detach()],
                           rdma=lab.options(f"rxe{i}"))
errors = lab.both(lambda: add(0), lambda: add(1))
print(json.dumps([str(e) for e in errors]))
[e.close(5.0) for e in engines]
"""


def test_the_limit_of_locked_memory_names_itself_and_what_to_do() -> None:
    """Without the right to lock memory at will, which root has."""
    result = subprocess.run(
        ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock",
         "prlimit", "--memlock=65536:65536", sys.executable, "-P", "-c", _LOCKED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*IN_PLACE, str(Path(__file__).parent)])},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "memlock" in result.stdout or "ulimit -l" in result.stdout, result.stdout


def test_discovery_agrees_with_pyverbs(pyverbs_peer) -> None:
    import pyverbs.enums as e
    from pyverbs.device import Context, get_device_list

    found = {(p["name"], p["port"]): p for p in _native.rdma_devices()}
    names = [entry.name.decode() for entry in get_device_list()]
    assert {name for name, _ in found} == set(names) and {"rxe0", "rxe1"} <= set(names)
    for name in names:
        with Context(name=name) as context:
            port = context.query_port(1)
            mine = found[name, 1]
            assert (mine["state"] == "ACTIVE") == (port.state == e.IBV_PORT_ACTIVE)
            assert mine["active_mtu"] == 128 << port.active_mtu
            assert mine["link_layer"] == "Ethernet"
            table = {gid["index"]: gid["gid"] for gid in mine["gids"]}
            assert table and all(str(context.query_gid(1, i)) == gid for i, gid in table.items())
