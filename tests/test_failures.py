"""Deaths, mismatches and delays: one error, the same on every device of every surviving cluster, and soon."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from harness.case import CASES, DATA_MODEL, MeshSpec
from harness.ends import all_failed, messages, still_alive
from harness.layout import Layout
from harness.pool import Pool, Reply, Run, World
from jax_hetccl.unready import GRACE_S

# From the death of a peer to the last survivor's error: EOF at once, 0.3 s to agree, and a busy machine of two cores.
NOTICE_S = 5.0
TWO, THREE = "2/1", "2/1/2"
EVERYWHERE = [(TWO, "shm"), (TWO, "tcp"), (THREE, "shm"), (THREE, "tcp")]
everywhere = pytest.mark.parametrize(("layout", "transport"), EVERYWHERE, ids=[f"{a}-{b}" for a, b in EVERYWHERE])


def _run(name: str, mesh: MeshSpec | None = None) -> Run:
    return Run(CASES[name], vma=False, mesh=mesh)


@pytest.fixture
def start(pool: Pool) -> Iterator[Any]:
    """Starts a world of its own for one test, with the test's timeouts."""
    pool.retire()
    made: list[World] = []

    def go(layout: str, transport: str, **options: Any) -> World:
        made.append(World(Layout.parse(layout), transport, **options))
        return made[-1]

    yield go
    for world in made:
        world.kill()


def _last(world: World) -> str:
    return world.workers[-1][1].label


def _leave_in_order(world: World, *gone: str) -> None:
    wrong = world.close(skip=gone)
    assert not wrong, "\n".join(wrong)


def _kill(world: World, victim: str, replies_within: float = NOTICE_S) -> tuple[list[Reply], float]:
    started = time.monotonic()
    world.worker(victim).signal(signal.SIGKILL)
    replies = world.answers(replies_within, skip=(victim,))
    return replies, time.monotonic() - started


@everywhere
def test_peer_killed_while_others_wait(start: Any, layout: str, transport: str) -> None:
    world = start(layout, transport)
    run = _run("failing.one[psum f32[4]]")
    assert not any(r.error for r in world.run(run))
    victim = _last(world)
    world.ask([None if w.label == victim else run for _, w in world.workers], each_device=True)
    time.sleep(0.7)
    replies, _ = _kill(world, victim)
    all_failed(replies, "PeerLostError", victim.split("/")[0], r"psum")
    still_alive(world, victim)
    _leave_in_order(world, victim)


@everywhere
def test_peer_killed_during_large_transfers(start: Any, layout: str, transport: str) -> None:
    world = start(layout, transport)
    victim = _last(world)
    world.ask([_run("failing.endless")] * len(world.workers), each_device=True)
    time.sleep(3)
    replies, _ = _kill(world, victim)
    all_failed(replies, "PeerLostError", victim.split("/")[0])
    still_alive(world, victim)
    _leave_in_order(world, victim)


def test_first_cluster_killed(start: Any) -> None:
    """The process that ran the coordinator is no more special than the others."""
    world = start(THREE, "tcp")
    world.ask([_run("failing.endless")] * len(world.workers), each_device=True)
    time.sleep(3)
    replies, _ = _kill(world, "left/0")
    all_failed(replies, "PeerLostError", "left")
    _leave_in_order(world, "left/0")


def test_peer_killed_before_it_ever_called(start: Any) -> None:
    world = start(TWO, "tcp")
    world.ask([_run("failing.one[psum f32[4]]"), None], each_device=True)
    time.sleep(2)
    replies, _ = _kill(world, "right/0", 10)
    for reply in replies:
        assert any("right" in text for text in messages(reply).values()), reply.raw
    _leave_in_order(world, "right/0")


def test_one_process_of_a_cluster_killed(start: Any) -> None:
    """The other cluster learns of it; the cluster's own rest is jax.distributed's business."""
    world = start("1+1/1", "tcp")
    world.ask([_run("failing.endless")] * len(world.workers), each_device=True)
    time.sleep(3)
    world.worker("left/1").signal(signal.SIGKILL)
    replies = world.answers(NOTICE_S, skip=("left/0", "left/1"))
    all_failed(replies, "PeerLostError", "left")


def test_peer_killed_during_a_loop_of_integers(start: Any) -> None:
    """Poison of integers is 0 and cannot end a loop: the engine does, soon after its timeout."""
    world = start(TWO, "shm", timeout=3.0)
    world.ask([_run("failing.endless_loop_on_device")] * len(world.workers), each_device=True)
    time.sleep(3)
    replies, _ = _kill(world, "right/0", 3.0 + NOTICE_S)
    all_failed(replies, "PeerLostError", "right")
    _leave_in_order(world, "right/0")


def test_further_programs_fail_at_once(start: Any) -> None:
    world = start(TWO, "shm")
    run = _run("failing.one[psum f32[4]]")
    assert not any(r.error for r in world.run(run))
    world.ask([run, None], each_device=True)
    time.sleep(0.5)
    first, _ = _kill(world, "right/0")
    world.ask([run, None], each_device=True)
    second = world.answers(NOTICE_S)
    all_failed(first + second, "PeerLostError", "right")
    _leave_in_order(world, "right/0")


def _both(world: World, left: str, right: str) -> list[Reply]:
    """The first cluster runs one program, all others the other one."""
    runs = [_run("failing." + (left if c == 0 else right)) for c, _ in world.workers]
    world.ask(runs, each_device=True)
    return world.answers(25)


_F4, _F8, _I4 = r"f(loat)?32\[(1,)?4\]", r"f(loat)?32\[(1,)?8\]", r"[is](nt)?32\[(1,)?4\]"
_MISMATCHES = {
    "shape": ("one[psum f32[4]]", "one[psum f32[8]]", (_F4, _F8)),
    "dtype": ("one[psum f32[4]]", "one[psum i32[4]]", (_F4, _I4)),
    "op": ("one[psum f32[4]]", "one[pmax f32[4]]", ("psum", "pmax")),
    "large-small": ("one[psum f32[2M]]", "one[psum f32[4]]", (r"2097152", _F4)),
    "order": ("swapped[left]", "swapped[right]", ("psum", "pmax")),
    "predicate": ("divergent_cond[left]", "divergent_cond[right]", ("psum", "pmax")),
    "loop length": ("divergent_loop[left]", "divergent_loop[right]", ("psum", "pmax")),
}
_WHERE = [
    (TWO, "shm", "shape"),
    (THREE, "tcp", "shape"),
    (TWO, "tcp", "dtype"),
    (THREE, "shm", "op"),
    (TWO, "tcp", "large-small"),
]
_WHERE += [
    (TWO, "tcp", "order"),
    (TWO, "shm", "predicate"),
    (THREE, "tcp", "predicate"),
    (TWO, "shm", "loop length"),
]


@pytest.mark.parametrize(("layout", "transport", "what"), _WHERE, ids=["-".join(w) for w in _WHERE])
def test_mismatch_shows_both_sides(start: Any, layout: str, transport: str, what: str) -> None:
    left, right, patterns = _MISMATCHES[what]
    world = start(layout, transport)
    all_failed(_both(world, left, right), "MismatchError", "left", *patterns)
    still_alive(world)
    _leave_in_order(world)


@pytest.mark.parametrize(("layout", "transport"), [(TWO, "shm"), (THREE, "tcp")])
def test_a_cluster_that_never_calls(start: Any, layout: str, transport: str) -> None:
    """The error names who is late, in about the arrival timeout."""
    world = start(layout, transport, arrival_timeout=3.0)
    run = _run("failing.one[psum f32[4]]")
    assert not any(r.error for r in world.run(run))
    late = _last(world)
    world.ask([None if w.label == late else run for _, w in world.workers], each_device=True)
    started = time.monotonic()
    replies = world.answers(3.0 + NOTICE_S)
    assert time.monotonic() - started > 2.0, "failed before the time was up"
    all_failed(replies, "ExchangeTimeoutError", late.split("/")[0], "psum")
    _leave_in_order(world)


@pytest.mark.parametrize(("layout", "transport"), [(TWO, "shm"), (TWO, "tcp")])
def test_a_peer_that_stops_in_the_middle(start: Any, layout: str, transport: str) -> None:
    """A stopped process keeps its sockets open: only the time limit finds it."""
    world = start(layout, transport, timeout=3.0, arrival_timeout=3.0)
    world.ask([_run("failing.endless")] * len(world.workers), each_device=True)
    time.sleep(3)
    stopped = world.worker(_last(world))
    stopped.signal(signal.SIGSTOP)
    try:
        replies = world.answers(3.0 + NOTICE_S + 3.0, skip=(stopped.label,))
        all_failed(replies, "ExchangeTimeoutError", stopped.label.split("/")[0], r"\d+ (bytes )?of \d+|\d+/\d+")
    finally:
        stopped.signal(signal.SIGCONT)


def test_compile_error_of_one_cluster_reaches_the_other(start: Any) -> None:
    """Long before the arrival timeout."""
    world = start(TWO, "shm", arrival_timeout=60.0)
    world.ask([_run("failing.compile_error[good]"), _run("failing.compile_error[bad]")], each_device=True)
    replies = world.answers(15)
    for reply in replies:
        texts = messages(reply).values()
        assert reply.label.startswith("right") or all("right" in t for t in texts), texts


def test_lowering_error_of_one_cluster_reaches_the_other(start: Any) -> None:
    """Long before the arrival timeout."""
    world = start(TWO, "shm", arrival_timeout=60.0)
    world.ask([_run("failing.lowering_error[good]"), _run("failing.lowering_error[bad]")], each_device=True)
    for reply in world.answers(GRACE_S + NOTICE_S + 5):
        texts = messages(reply).values()
        assert all("not found for platform" in t for t in texts), f"{reply.label}: {texts}"
        assert reply.label.startswith("right") or all("right/0" in t for t in texts), texts


def test_lowering_error_of_all_clusters_is_not_a_failure(start: Any) -> None:
    """Each raises its own, and the world goes on; so it does where one cluster has taken another program instead."""
    world = start(TWO, "shm", arrival_timeout=60.0)
    bad, good = _run("failing.lowering_error[bad]"), _run("failing.lowering_error[good]")
    for runs in ([bad] * 2, [bad, None]):
        world.ask(runs, each_device=True)
        for reply in world.answers(15):
            assert all("not found for platform" in t for t in messages(reply).values())
    world.ask([None, good], each_device=True)
    time.sleep(2)
    world.ask([good, None], each_device=True)
    for reply in world.answers(20):
        assert reply.error is None and reply.health is None and not any(reply.raw["devices"].values()), reply.raw
    _leave_in_order(world)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_mesh_whose_devices_are_in_another_order(start: Any, transport: str) -> None:
    """One cluster turns its mesh around, which the others cannot see: it gets the error while it lowers its program,
    and they hear of it long before the arrival timeout, in the program that they are running already."""
    world = start(TWO, transport, arrival_timeout=60.0)
    name = "failing.one[psum f32[4]]"
    assert not any(r.error for r in world.run(_run(name)))
    turned = MeshSpec(order="reversed")
    world.ask([_run(name, turned if c == 0 else None) for c, _ in world.workers], each_device=True)
    for reply in world.answers(NOTICE_S + 5):
        texts = messages(reply).values()
        assert texts and all("left" in t and "order" in t for t in texts), f"{reply.label}: {reply.raw}"
        bases = [b for error in (reply.error, reply.health) if error for b in error["bases"]]
        assert any(b.endswith(".AgreementError") for b in bases), f"{reply.label}: {reply.raw}"


def test_meshes_that_disagree(start: Any) -> None:
    """Another size of the other axis: an error on both sides that names both clusters."""
    world = start("4/4", "shm")
    four = MeshSpec(("data", "model"), (("model", 4),))
    runs = [_run("meshes.data_only", DATA_MODEL if c == 0 else four) for c, _ in world.workers]
    world.ask(runs, each_device=True)
    for reply in world.answers(25):
        assert reply.error is not None, f"{reply.label} raised nothing"
        assert any(b.endswith(".AgreementError") for b in reply.error["bases"]), reply.error["trace"]
        assert "left" in reply.error["message"] and "right" in reply.error["message"], reply.error["message"]


def test_the_size_of_an_axis_given_to_initialize(start: Any) -> None:
    world = start(TWO, "shm", axes={"data": 3})
    assert not any(r.error for r in world.run(_run("failing.one[psum f32[4]]")))
    _leave_in_order(world)


def test_a_wrong_size_of_an_axis_given_to_initialize(start: Any) -> None:
    """An error on every cluster that shows both sizes, not a wrong mean."""
    world = start(TWO, "tcp", axes={"data": 4}, arrival_timeout=8.0)
    world.ask([_run("failing.one[psum f32[4]]")] * len(world.workers), each_device=True)
    for reply in world.answers(25):
        text = " ".join(messages(reply).values())
        assert "data" in text and "3" in text and "4" in text, f"{reply.label}: {text}"
        types = (reply.error or reply.health or {"bases": []})["bases"]
        assert any(b.endswith(".AgreementError") for b in types), f"{reply.label}: {reply.raw}"


def test_a_normal_end_is_not_a_loss(start: Any) -> None:
    """One cluster leaves in order while the other stays: no error until the other needs it again."""
    world = start(TWO, "tcp")
    run = _run("failing.one[psum f32[4]]")
    assert not any(r.error for r in world.run(run))
    leaving = world.worker("right/0")
    leaving.ask(op="shutdown")
    assert leaving.answer(15)["threads"] == []
    leaving.ask_to_leave()
    assert leaving.left(10) == 0
    time.sleep(1.5)
    left = world.worker("left/0")
    left.ask(op="ping")
    assert left.answer(5)["health"] is None, "an orderly goodbye counted as a loss"
    world.ask([run, None], each_device=True)
    for reply in world.answers(10):
        assert all("right" in text for text in messages(reply).values())


def test_a_second_world_in_the_same_processes(start: Any) -> None:
    """shutdown and initialize again: nothing of the first world is left in cached programs."""
    world = start(TWO, "shm")
    run = _run("failing.one[psum f32[4]]")
    assert not any(r.error for r in world.run(run))
    assert all(not r.error and r.raw["threads"] == [] for r in world.request(15, op="shutdown"))
    assert all(not r.error for r in world.request(30, op="initialize", initialize={"axes": ["data"]}))
    assert not any(r.error for r in world.run(run))
    _leave_in_order(world)
