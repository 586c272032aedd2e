"""What a process may do to itself and its world: stop, fork, leave early, raise, run out of something, live for long."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from meeting import config

from harness import streams
from harness.layout import Layout
from harness.pool import Pool, World
from harness.process import Process, WorkerGoneError
from jax_hetccl import _limits, forking
from jax_hetccl._errors import HetcclError, PeerLostError
from jax_hetccl.launch.ports import reserve_port
from jax_hetccl.rendezvous import coordinator

TIMEOUT_S = 4.0


def test_looking_for_a_worlds_sockets_opens_nothing() -> None:
    """A child that held a copy of a pipe's end would never see its end."""
    read, write = os.pipe()
    before = os.listdir("/proc/self/fd")
    for descriptor in before:
        list(forking._ends(int(descriptor)))
    assert os.listdir("/proc/self/fd") == before
    os.close(write)
    assert os.read(read, 1) == b""
    os.close(read)


@pytest.fixture
def start(pool: Pool) -> Iterator[Callable[..., World]]:
    """Starts a world of forked processes with short time-outs."""
    pool.retire()
    made: list[World] = []

    def go(layout: str = "1/1", transport: str = "shm", **options: Any) -> World:
        options = {"timeout": TIMEOUT_S, "arrival_timeout": TIMEOUT_S, **options}
        made.append(World(Layout.parse(layout), transport, **options))
        return made[-1]

    yield go
    for world in made:
        world.kill()


def _call(worker: Process, name: str, **arguments: Any) -> None:
    worker.ask(op="call", call=f"fault_programs:{name}", arguments=arguments)


def _both(world: World, name: str, limit: float = 60.0, **arguments: Any) -> list[dict[str, Any]]:
    """Calls a function everywhere and returns the answers."""
    for _, worker in world.workers:
        _call(worker, name, **arguments)
    answers = [worker.answer(limit) for _, worker in world.workers]
    assert not any("error" in answer for answer in answers), answers
    return answers


def _fine(answers: list[dict[str, Any]], steps: int) -> None:
    for answer in answers:
        assert answer["steps"] == steps and not answer["wrong"] and not answer["text"], answer


def test_a_process_that_stops_and_goes_on_within_the_bound(start: Any) -> None:
    world = start(transport="tcp")
    streams.begin(world, steps=60, pause=0.02)
    stopped = world.worker("right/0")
    for _ in range(2):
        stopped.signal(signal.SIGSTOP)
        time.sleep(TIMEOUT_S / 2)
        stopped.signal(signal.SIGCONT)
        time.sleep(0.3)
    _fine([worker.answer(30) for _, worker in world.workers], 60)
    assert not world.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_process_that_stops_for_longer_is_late_not_dead(start: Any, transport: str) -> None:
    """The others raise when its time is over, not before; it raises the same when it goes on."""
    world = start(transport=transport)
    streams.begin(world)
    stopped = world.worker("right/0")
    stopped.signal(signal.SIGSTOP)
    since = time.monotonic()
    try:
        answer = world.worker("left/0").answer(TIMEOUT_S + 10)
    finally:
        stopped.signal(signal.SIGCONT)
    assert answer["kind"] == "ExchangeTimeoutError" and "right/0" in answer["check"] and not answer["wrong"], answer
    assert TIMEOUT_S - 0.5 < answer["at"] - since < TIMEOUT_S + 3, answer["at"] - since
    late = stopped.answer(20)
    assert late["kind"] == "ExchangeTimeoutError" and late["check"] == answer["check"], late


def test_the_coordinator_dies_and_comes_back(start: Any) -> None:
    """Steps go on without it; a new world can be joined when it is there again."""
    port = reserve_port()
    secret = "0123456789abcdef" * 4
    settings = config("left/0", port, clusters="left:1,right:1", secret=secret)
    serving = coordinator.serve(settings)
    environment = {
        "HETCCL_COORDINATOR": f"127.0.0.1:{port}", "HETCCL_SECRET": secret, "HETCCL_COORDINATOR_EXTERNAL": "1",
    }  # fmt: skip
    try:
        world = start(environment=environment)
        streams.begin(world, steps=30, pause=0.05)
        serving.stop()
        _fine([worker.answer(30) for _, worker in world.workers], 30)
        assert all(not r.error for r in world.request(20, op="shutdown"))
        serving = coordinator.serve(settings)
        assert all(not r.error for r in world.request(60, op="initialize", initialize={"axes": ["data"]}))
        _fine(_both(world, "stream", steps=2), 2)
        assert not world.close()
    finally:
        serving.stop()


def test_a_fork_is_no_member(start: Any) -> None:
    """The child ends on its own, and has nothing that would hide the parent's death from the others."""
    world = start(transport="tcp")
    _fine(_both(world, "stream", steps=2), 2)
    left, right = world.worker("left/0"), world.worker("right/0")
    _call(left, "forked", sleep=0)
    answer = left.answer(20)
    assert answer["status"] == 0 and answer["sockets"] == 0 and answer["took"] < 2, answer
    _fine(_both(world, "stream", steps=2), 2)
    _call(right, "forked", sleep=30)
    orphan = right.answer(20)["pid"]
    try:
        _call(left, "stream")
        time.sleep(0.5)
        killed = time.monotonic()
        os.kill(right.pid, signal.SIGKILL)
        answer = left.answer(20)
        assert answer["kind"] == "PeerLostError" and answer["at"] - killed < 2, answer
        os.kill(orphan, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphan, signal.SIGKILL)


def test_exit_without_waiting_for_the_results(start: Any) -> None:
    world = start("2/1")
    _both(world, "dispatch")
    for _, worker in world.workers:
        worker.ask_to_leave()
    assert [worker.left(15) for _, worker in world.workers] == [0, 0]


def test_a_process_that_leaves_by_exit(start: Any) -> None:
    """`os._exit` runs nothing: for the others it is a death."""
    world = start("1/2")
    left, right = world.worker("left/0"), world.worker("right/0")
    _call(right, "leave", status=7, after=3)
    _call(left, "stream")
    answer = left.answer(30)
    assert answer["kind"] == "PeerLostError" and "right/0" in answer["check"] and not answer["wrong"], answer
    assert right.left(5) == 7


def test_an_exception_of_the_user_is_the_users(start: Any) -> None:
    """Caught, it disturbs nobody, whether in Python or in a callback of a program."""
    world = start("2/1")
    for in_program in (False, True):
        for answer in _both(world, "raising", in_program=in_program):
            assert not answer["wrong"] and not answer["failed"], answer
    assert not world.close()


def test_two_threads_with_an_axis_each(start: Any) -> None:
    world = start("1/1", axes=("data", "other"), timeout=20.0, arrival_timeout=20.0)
    for answer in _both(world, "two_threads", steps=30):
        assert not answer["alive"] and not answer["errors"] and answer["done"] == {"data": 30, "other": 30}, answer
    assert not world.close()


# --- running out of something --------------------------------------------------------------------


def _scarce(start: Any, transport: str = "shm", environment: Any = None, **surroundings: Any) -> None:
    """Two processes in such surroundings exchange and leave, as always."""
    around = {label: surroundings for label in ("left/0", "right/0")}
    world = start(transport=transport, surroundings=around, environment=environment or {})
    _fine(_both(world, "stream", steps=3), 3)
    assert not world.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_no_locked_memory(start: Any, transport: str) -> None:
    _scarce(start, transport, limits={"RLIMIT_MEMLOCK": 0})


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting file systems needs root")


@needs_root
def test_a_tiny_dev_shm(start: Any) -> None:
    """Shared memory is a memfd: it needs no place there."""
    _scarce(start, mount={"/dev/shm": "4k"})


@needs_root
def test_a_full_disk(start: Any, tmp_path: Path) -> None:
    """Nothing is written where temporary files go. Not /tmp itself, where what the tests need may lie."""
    full = {str(tmp_path): "4k", "/var/tmp": "4k", "/dev/shm": "4k"}
    _scarce(start, environment={"TMPDIR": str(tmp_path)}, mount=full)


def test_few_descriptors(start: Any) -> None:
    _scarce(start, limits={"RLIMIT_NOFILE": 64})


def _refused(start: Any, **surroundings: Any) -> str:
    with pytest.raises(WorkerGoneError) as caught:
        start(surroundings={"right/0": surroundings}, environment={"HETCCL_JOIN_TIMEOUT": "5"})
    return str(caught.value)


def test_too_few_descriptors_is_one_error_with_the_fix(start: Any) -> None:
    text = _refused(start, limits={"RLIMIT_NOFILE": 12})
    assert re.search("ConfigError: right/0 needs about [0-9]+ file descriptors.* raise `ulimit -n`", text), text


def test_too_little_address_space_holds_up_nobody(start: Any) -> None:
    """Where it runs out first is in XLA, which ends the process; what it is in ours has the fix (below)."""
    since = time.monotonic()
    assert "right/0" in _refused(start, limits={"RLIMIT_AS": 500 << 20})
    assert time.monotonic() - since < 25


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "raise `ulimit -n`"),
        (zmq.ZMQError(errno.EMFILE), "raise `ulimit -n`"),
        (RuntimeError("can't start new thread"), "raise `ulimit -u`"),
        (MemoryError("no"), "raise `ulimit -v`"),
        (OSError(errno.ENOSPC, "No space left on device", "/var/x"), "/var/x"),
    ],
)
def test_running_out_is_an_error_with_the_fix(error: Exception, fix: str) -> None:
    with pytest.raises(HetcclError, match=re.escape(fix)) as caught, _limits.explained("left/0 cannot join"):
        raise error
    assert str(caught.value).startswith("left/0 cannot join: ") and caught.value.__cause__ is error


def test_other_errors_stay_what_they_are() -> None:
    for error in (OSError(errno.ENOENT, "no"), RuntimeError("other"), PeerLostError("x")):
        with pytest.raises(type(error)) as caught, _limits.explained("x"):
            raise error
        assert caught.value is error


def test_enough_address_space_for_jax_is_enough(start: Any) -> None:
    _scarce(start, limits={"RLIMIT_AS": 2 << 30})


# --- for long ----------------------------------------------------------------------------------


def _no_growth(answers: list[dict[str, Any]], megabytes: float) -> None:
    for answer in answers:
        early, late = answer["early"], answer["late"]
        assert late["descriptors"] <= early["descriptors"] + 4, answer  # connections that stand already or not yet
        assert late["tasks"] <= early["tasks"] + 4, answer  # of the pool of completions, which shrinks when it is idle
        assert late["memfds"] <= early["memfds"], answer
        assert late["rss_mb"] - early["rss_mb"] < megabytes, answer


def test_worlds_leave_nothing_behind(start: Any, soak: bool) -> None:
    world = start(timeout=30.0, arrival_timeout=30.0)
    count = 1000 if soak else 12
    answers = _both(world, "cycles", limit=4 * count + 60, count=count)
    _no_growth(answers, 60 if soak else 20)
    assert not world.close()


def test_collectives_leave_nothing_behind(start: Any, soak: bool) -> None:
    world = start(timeout=30.0, arrival_timeout=30.0)
    count = 100_000 if soak else 3_000
    _no_growth(_both(world, "many", limit=600, count=count), 5)
    assert not world.close()
