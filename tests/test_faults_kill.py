"""kill -9 of any process at any moment: the others know who, in which operation, within two seconds, and leave nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from harness import streams
from harness.layout import Layout
from harness.pool import Pool, World
from harness.process import WorkerGoneError

MOMENTS, SOAK_MOMENTS = 10, 200
# From the death to the last survivor's error: the goal, and what one moment in ten may take on a busy machine of two
# cores, where a survivor may have to wait for its turn to run at all.
NOTICE_S, BUSY_S = 2.0, 4.0
# Moments are drawn from the time in which all trace, compile and connect, and from the time in which all exchange.
SETTING_UP_S, EXCHANGING_S = 0.6, 0.4


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _sockets_of(pids: set[int]) -> list[str]:
    names = re.findall(r"@(hetccl-(\d+)-\S+)", Path("/proc/net/unix").read_text())
    return [name for name, pid in names if int(pid) in pids]


class _Driver:
    """One world after another in the same processes; each loses one process, which a new one replaces."""

    def __init__(self, world: World, seed: str) -> None:
        self._world, self._random = world, random.Random(seed)
        self._before: dict[int, dict[str, Any]] = {}
        self._worked: set[str] = set()  # in the last moment
        self.pids = {worker.pid for _, worker in world.workers}
        self.notices: list[float] = []
        self.steps = self.named = 0

    def moment(self, exchanging: bool) -> None:
        """Kills a process while all are at work, and looks at how the others end."""
        workers = [worker for _, worker in self._world.workers]
        victim = self._random.choice(workers)
        delay = self._random.uniform(0, EXCHANGING_S if exchanging else SETTING_UP_S)
        what = f"{victim.label} killed {delay:.3f} s after the first {'step' if exchanging else 'call'}"
        (streams.begin if exchanging else streams.ask)(self._world)
        time.sleep(delay)
        killed = time.monotonic()
        victim.signal(signal.SIGKILL)
        survivors = [worker for worker in workers if worker is not victim]
        errors = set()
        self._worked = set()
        for worker in survivors:
            reply = worker.answer(30)
            assert "steps" in reply, f"{what}: {worker.label}: {reply}"
            assert not reply["wrong"], f"{what}: {worker.label} had wrong results: {reply['wrong']}"
            assert reply["kind"] == "PeerLostError", f"{what}: {worker.label}: {reply}"
            assert victim.label in reply["check"], f"{what}: {worker.label}: {reply['check']}"
            if reply["steps"] > 0:
                self._worked.add(worker.label)
            self.notices.append(reply["at"] - killed)
            self.steps += reply["steps"]
            errors.add(reply["check"])
            assert reply["steps"] > 0 or not exchanging, f"{what}: {worker.label}: {reply}"
        assert len(errors) == 1, f"{what}: {errors}"
        if exchanging:
            self.named += bool(re.search(r"during (psum|all_gather|sync)", *errors))
        self._replace(victim, survivors, what)

    def _replace(self, victim: Any, survivors: list[Any], what: str) -> None:
        for worker in survivors:
            worker.ask(op="shutdown")
        for worker in survivors:
            assert worker.answer(20)["threads"] == [], f"{what}: {worker.label} keeps threads"
            worker.ask(op="call", call="fault_programs:facts")
            now = worker.answer(20)
            assert now["memfds"] == 0, f"{what}: {worker.label} keeps shared memory: {now}"
            if worker.label in self._worked:  # XLA opens its own, sockets too, when it first runs a program
                before = self._before.setdefault(worker.pid, now)
                assert now["descriptors"] <= before["descriptors"], f"{what}: {worker.label}: {before} then {now}"
        new = self._world.replace(victim.label)
        self.pids.add(new.pid)
        for worker in survivors:
            worker.ask(op="initialize", initialize={"axes": ["data"]})
        for worker in survivors:
            reply = worker.answer(60)
            assert "error" not in reply, f"{what}: {worker.label} joins no further world: {reply}"
        assert "error" not in new.answer(60)


CLUSTERS = {"2 clusters": "2/1", "3 clusters": "1/2/1"}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("clusters", CLUSTERS)
def test_any_process_killed_at_any_moment(pool: Pool, soak: bool, clusters: str, transport: str) -> None:
    pool.retire()
    shared = _shared_memory()
    world = World(Layout.parse(CLUSTERS[clusters]), transport, timeout=30.0, arrival_timeout=30.0)
    try:
        driver = _Driver(world, f"{clusters} {transport}")
        for moment in range(SOAK_MOMENTS if soak else MOMENTS):
            driver.moment(exchanging=moment % 3 > 0)
        wrong = world.close()
        assert not wrong, "\n".join(wrong)
    finally:
        world.kill()
    late = [notice for notice in driver.notices if notice > NOTICE_S]
    assert len(late) <= len(driver.notices) / 10 and max(driver.notices) < BUSY_S, sorted(driver.notices)
    # Nothing need be under way at the very moment, if all compute.
    assert driver.named >= len(driver.notices) / 5, f"only {driver.named} of the errors name an operation"
    assert _shared_memory() <= shared and not _sockets_of(driver.pids)
    print(
        f"{len(driver.notices)} notices, {max(driver.notices):.2f} s at most; {driver.steps} steps, {driver.named} named"
    )


@pytest.mark.parametrize("victim", ["left/1", "left/0"])
def test_a_process_of_a_cluster_of_several(pool: Pool, victim: str) -> None:
    """The rest of its own cluster raises the same error, or is ended by jax.distributed, whose service died with the
    cluster's first process."""
    pool.retire()
    with World(Layout.parse("1+1/1"), "tcp", timeout=30.0, arrival_timeout=30.0) as world:
        streams.begin(world)
        killed = time.monotonic()
        world.worker(victim).signal(signal.SIGKILL)
        rest = world.worker("left/0" if victim == "left/1" else "left/1")
        for worker in (world.worker("right/0"), rest):
            try:
                reply = worker.answer(30)
            except WorkerGoneError:
                assert (worker, victim) == (rest, "left/0") and worker.left(1) == -signal.SIGABRT
            else:
                assert reply["kind"] == "PeerLostError" and victim in reply["check"] and not reply["wrong"], reply
                assert reply["at"] - killed < BUSY_S
        assert time.monotonic() - killed < BUSY_S
