"""The native engine through its XLA custom calls, against a peer that speaks the wire protocol from Python."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from native_calls import (
    EPOCH,
    HEADER,
    MAGIC,
    PLAN,
    PROGRAM,
    TOKEN,
    add_plan,
    check,
    current_engine,
    empty_chain,
    header,
    read,
    swap,
    swap_and_check,
    swap_only,
)

from jax_hetccl import _native, session


class Peer:
    """Rank 1 of a world whose rank 0 is this process' engine."""

    def __init__(self, engine: _native.Engine) -> None:
        self.inbox, theirs_out = socket.socketpair()
        self.outbox, theirs_in = socket.socketpair()
        for outgoing, sock in ((True, theirs_out), (False, theirs_in)):
            engine.add_channel(local_rank=0, peer_rank=1, outgoing=outgoing, transport="tcp", fds=[sock.detach()])
        for sock in (self.inbox, self.outbox):
            sock.settimeout(10)

    def receive(self) -> tuple[tuple[Any, ...], bytes]:
        """The next message: header fields and payload."""
        fields = HEADER.unpack(read(self.inbox, HEADER.size))
        return fields, read(self.inbox, fields[9])

    def send(self, payload: bytes, **changes: Any) -> None:
        self.outbox.sendall(header(len(payload), **changes) + payload)

    def die(self) -> None:
        self.inbox.close()
        self.outbox.close()


@pytest.fixture
def engine() -> Iterator[_native.Engine]:
    """The current engine, with short bounds."""
    with current_engine(timeout_s=0.5, arrival_timeout_s=1.0, mismatch_grace_s=0.2) as made:
        yield made


@pytest.fixture
def peer(engine: _native.Engine) -> Iterator[Peer]:
    made = Peer(engine)
    yield made
    made.die()


@pytest.fixture
def later() -> Iterator[Callable[..., concurrent.futures.Future[Any]]]:
    """Runs a function on another thread: programs wait for the peer that the test plays."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        yield pool.submit


def test_moves_bytes_both_ways_and_counts_them(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.arange(1000, dtype=np.float32)
    add_plan(engine, x.nbytes)
    for run in range(3):
        result = later(lambda: np.asarray(swap_and_check(x)))
        fields, payload = peer.receive()
        assert payload == x.tobytes()
        assert fields[0] == MAGIC and fields[5] == EPOCH and fields[6] == PROGRAM
        assert fields[7] == run, "the occurrence counts the runs"
        assert fields[12].rstrip(b"\0") == b"psum/data test"
        peer.send((2 * x).tobytes(), occurrence=run)
        np.testing.assert_array_equal(result.result(10), 2 * x)
    stats = engine.stats()
    assert stats["peers"][1]["bytes_sent"] == stats["bytes_sent"] == 3 * x.nbytes
    assert stats["peers"][1]["bytes_received"] == 3 * x.nbytes
    assert stats["peers"][1]["messages_sent"] == 3
    assert stats["in_flight"] == 0 and stats["copies"] == 0
    assert engine.failure() is None


def test_data_may_arrive_before_and_in_pieces(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.arange(50_000, dtype=np.int32)
    add_plan(engine, x.nbytes)
    message = header(x.nbytes) + x.tobytes()
    peer.outbox.sendall(message[:100])
    result = later(lambda: np.asarray(swap_and_check(-x)))
    for start in range(100, len(message), 33_333):
        time.sleep(0.01)
        peer.outbox.sendall(message[start : start + 33_333])
    peer.receive()
    np.testing.assert_array_equal(result.result(10), x)


def test_several_exchanges_keep_their_order(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.ones(10, np.float32)
    add_plan(engine, x.nbytes)

    @jax.jit
    def three(x: jax.Array) -> jax.Array:
        chain = empty_chain()
        for index in range(3):
            chain, x = swap(x + 1, chain, index=index)
        return check(chain, x)

    result = later(lambda: np.asarray(three(x)))
    for index in range(3):
        fields, payload = peer.receive()
        assert fields[4] == index
        peer.send((10 * np.frombuffer(payload, np.float32)).tobytes(), index=index)
    np.testing.assert_array_equal(result.result(10), np.full(10, 2110, np.float32))


def test_python_is_free_while_a_program_waits(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.ones(10, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: np.asarray(swap_and_check(x)))
    peer.receive()
    line = engine.pending()[-1]  # the sending half may still be about to end
    assert line.startswith("psum/data test") and "0 of 40 bytes from right/0 rank 1" in line
    assert engine.waits()[-1][2] == line and engine.waits()[-1][0] == 1
    assert not result.done()
    peer.send(x.tobytes())
    result.result(10)
    assert engine.pending() == []


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
     ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e4m3fnuz, np.complex64],
)  # fmt: skip
def test_a_failed_exchange_delivers_nan(engine: _native.Engine, peer: Peer, later: Any, dtype: Any) -> None:
    x = jnp.ones(100, dtype)
    add_plan(engine, x.nbytes)
    result = later(lambda: jax.block_until_ready(swap_only(x)))
    peer.receive()
    engine.abort("timeout", "agreed by all")
    chain, y = result.result(10)
    assert np.isnan(np.asarray(y).astype(np.complex64)).all()
    assert int(chain[3]) == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match="hetccl timeout: agreed by all"):
        jax.block_until_ready(swap_and_check(x))


@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.uint16, np.bool_])
def test_a_failed_exchange_delivers_zero_where_there_is_no_nan(
    engine: _native.Engine, peer: Peer, later: Any, dtype: Any
) -> None:
    x = jnp.ones(100, dtype)
    add_plan(engine, x.nbytes)
    result = later(lambda: jax.block_until_ready(swap_only(x)))
    peer.receive()
    engine.abort("timeout", "agreed by all")
    chain, y = result.result(10)
    assert not np.asarray(y).any()
    assert int(chain[3]) == 1


def test_the_failed_flag_travels_along_the_chain(engine: _native.Engine, peer: Peer) -> None:
    x = jnp.ones(10, jnp.float32)
    add_plan(engine, x.nbytes)
    engine.abort("peer_lost", "right is gone")

    @jax.jit
    def two(x: jax.Array) -> jax.Array:
        chain, x = swap(x, empty_chain())
        chain, x = swap(x, chain, index=1)
        return chain

    assert int(two(x)[3]) == 1


def test_status_reports_a_failure_that_no_exchange_met(engine: _native.Engine) -> None:
    read = jax.jit(lambda c: jax.ffi.ffi_call("hetccl_status", TOKEN, has_side_effect=True)(c))
    assert int(read(empty_chain())[3]) == 0
    engine.abort("timeout", "elsewhere")
    assert int(read(empty_chain())[3]) == 1
    _native.set_engine(None)
    assert int(read(empty_chain())[3]) == 1


def failed(engine: _native.Engine, result: concurrent.futures.Future[Any]) -> _native.Failure:
    """The failure that the engine noticed, after the program has raised it too."""
    failure = engine.wait_failure(10.0)
    assert failure is not None
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        result.result(10)
    assert failure.message in str(error.value)
    adopted = engine.failure()
    assert adopted is not None and adopted.message == failure.message
    return failure


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(index=4), "exchange #4"),
        (dict(wire=1, text=b"pmax/data other"), "pmax/data other"),
        (dict(occurrence=2), "run 2"),
        (dict(program=0xCD), "program cd"),
        (dict(epoch=1), "another world"),
    ],
)
def test_mismatches_show_both_sides(
    engine: _native.Engine, peer: Peer, later: Any, changes: dict[str, Any], expected: str
) -> None:
    x = np.ones(4, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: np.asarray(swap_and_check(x)))
    peer.send(x.tobytes(), **changes)
    failure = failed(engine, result)
    assert failure.kind == "mismatch"
    for part in (expected, "psum/data test", "left/0 rank 0", "right/0 rank 1"):
        assert part in failure.message


def test_another_size_is_a_mismatch(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.ones(4, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: np.asarray(swap_and_check(x)))
    peer.send(x.tobytes()[:8])
    assert "8 bytes" in failed(engine, result).message


def test_garbage_is_corrupt(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.ones(4, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: np.asarray(swap_and_check(x)))
    peer.outbox.sendall(b"GET / HTTP/1.1\r\n" * 20)
    assert failed(engine, result).kind == "corrupt"


def test_another_protocol_version_says_so(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.ones(4, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: np.asarray(swap_and_check(x)))
    peer.send(x.tobytes(), version=_native.protocol_version() + 1)
    assert "same jax_hetccl" in failed(engine, result).message


def test_a_dead_peer_is_noticed_at_once(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.ones(4, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: np.asarray(swap_and_check(x)))
    peer.receive()
    begin = time.monotonic()
    peer.die()
    failure = engine.wait_failure(10.0)
    assert time.monotonic() - begin < 0.5
    assert failure is not None and failure.kind == "peer_lost"
    assert "right/0 rank 1" in failure.message and "psum/data test" in failure.message
    failed(engine, result)


def test_a_peer_that_never_arrives_times_out(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.ones(4, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: np.asarray(swap_and_check(x)))
    failure = failed(engine, result)
    assert failure.kind == "timeout"
    assert "0 of 16 bytes from right/0 rank 1" in failure.message
    assert "HETCCL_ARRIVAL_TIMEOUT" in failure.message


def test_a_peer_that_stops_in_the_middle_times_out(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.ones(1000, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: np.asarray(swap_and_check(x)))
    peer.outbox.sendall(header(x.nbytes) + x.tobytes()[:1500])
    failure = failed(engine, result)
    assert failure.kind == "timeout" and "1500 of 4000 bytes" in failure.message


def test_a_program_without_a_world_says_what_to_do() -> None:
    session._register_targets("cpu")
    _native.set_engine(None)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"initialize\(\)"):
        jax.block_until_ready(swap_and_check(jnp.ones(4)))


def test_an_unknown_plan_says_what_to_do(engine: _native.Engine) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="no plan 7 for device ordinal 0"):
        jax.block_until_ready(swap_and_check(jnp.ones(4)))


def test_a_closed_engine_says_so(engine: _native.Engine) -> None:
    add_plan(engine, 16)
    engine.close(5.0)
    engine.close(5.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="shut down"):
        jax.block_until_ready(swap_and_check(jnp.ones(4)))


def test_closing_fails_what_is_under_way(engine: _native.Engine, peer: Peer, later: Any) -> None:
    x = np.ones(4, np.float32)
    add_plan(engine, x.nbytes)
    result = later(lambda: jax.block_until_ready(swap_only(x)))
    peer.receive()
    engine.close(5.0)
    chain, y = result.result(10)
    assert np.isnan(y).all() and int(chain[3]) == 1
    failure = engine.failure()
    assert failure is not None and failure.kind == "aborted"


def test_closing_says_goodbye(engine: _native.Engine, peer: Peer) -> None:
    time.sleep(0.05)
    engine.close(5.0)
    assert HEADER.unpack(peer.inbox.recv(HEADER.size))[3] == 2
    assert peer.outbox.recv(10) == b"G"
    assert peer.inbox.recv(1) == b"" == peer.outbox.recv(1)


def test_closing_gives_everything_back_whoever_keeps_the_engine(engine: _native.Engine) -> None:
    """Python may keep it for long, in the traceback of an error for example."""

    def held() -> int:
        found = Path("/proc/self/maps").read_text().count("memfd:hetccl")
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                found += os.fstat(int(entry)).st_ino in inodes
        return found

    ours, theirs = socket.socketpair()
    segment = _native.make_shm_segment(1 << 16, 4)
    inodes = {os.fstat(fd).st_ino for fd in (theirs.fileno(), *segment)}
    engine.add_channel(local_rank=0, peer_rank=1, outgoing=True, transport="shm", fds=[theirs.detach(), *segment])
    assert held() > 0
    engine.close(5.0)
    assert held() == 0
    ours.close()


def test_moved_buffers_are_an_error(engine: _native.Engine, peer: Peer, later: Any) -> None:
    """Without the alias, XLA gives the result another buffer than the one that was received into."""
    x = np.ones(4, np.float32)
    add_plan(engine, x.nbytes)

    @jax.jit
    def careless(x: jax.Array) -> jax.Array:
        names = dict(plan=np.int64(PLAN), program=np.int64(PROGRAM), index=np.int64(0))
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        start = jax.ffi.ffi_call("hetccl_exchange_start", (TOKEN, TOKEN, like), has_side_effect=True)
        chain, ticket, y = start(empty_chain(), x, **names)
        done = jax.ffi.ffi_call("hetccl_exchange_done", (TOKEN, like), has_side_effect=True)
        return done(chain, ticket, y, x, **names)[1]

    result = later(lambda: np.asarray(careless(x)))
    peer.receive()
    peer.send(x.tobytes())
    with pytest.raises(jax.errors.JaxRuntimeError, match="moved a buffer between start and done"):
        result.result(10)
    assert engine.stats()["copies"] == 1


def test_bad_arguments_are_errors(engine: _native.Engine) -> None:
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(RuntimeError, match='unknown transport "pigeon"; known ones: rdma, shm, tcp'):
        engine.add_channel(local_rank=0, peer_rank=1, outgoing=True, transport="pigeon", fds=[ours.detach()])
    with pytest.raises(RuntimeError, match="slots of 4 KB"):
        _native.make_shm_segment(10, 10)
    add_plan(engine, 16)
    add_plan(engine, 16)
    with pytest.raises(RuntimeError, match="must be unique"):
        add_plan(engine, 32)
    with pytest.raises(RuntimeError, match="set_local_device"):
        engine.add_plan(8, "psum", 1, 55, [], [])


def test_wait_failure_ends_with_the_engine(engine: _native.Engine, later: Any) -> None:
    assert engine.wait_failure(0.01) is None
    waiting = later(engine.wait_failure, 30.0)
    engine.close(5.0)
    assert waiting.result(5) is None


_FAULTS = """
import resource, sys, threading
from jax_hetccl import island

island.keep_memory(float(sys.argv[1]))
def second_buffer():  # in a thread, as XLA's buffers are
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        b"x" * (int(sys.argv[2]) << 20)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
faults = []
thread = threading.Thread(target=second_buffer)
thread.start()
thread.join()
print(faults[-1])
"""


@pytest.mark.parametrize(("megabytes", "kept"), [("256", True), ("0", False)])
@pytest.mark.parametrize("buffer_mb", [40, 100])  # above 64 MB an arena of a thread keeps nothing
def test_cpu_clusters_keep_freed_memory_unless_told_otherwise(
    megabytes: str, kept: bool, buffer_mb: int, tmp_path: Path
) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    result = subprocess.run(
        [sys.executable, "-c", _FAULTS, megabytes, str(buffer_mb)],
        env={**own, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,  # `python -c` looks for modules where it starts: it should find those the tests found
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert (int(result.stdout) < 100) == kept, f"{result.stdout.strip()} page faults in the third buffer"
