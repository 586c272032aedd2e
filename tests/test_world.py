"""Whole worlds of real processes: joining, ranks, channels, ending in order and otherwise."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from meeting import SECRET, config

from harness.process import IN_PLACE
from jax_hetccl import island
from jax_hetccl._errors import AgreementError, ConfigError, HetcclError
from jax_hetccl.launch.ports import reserve_port

world = importlib.import_module("jax_hetccl._world")

PREAMBLE = """
import importlib, json, os, threading, time
import jax
w = importlib.import_module("jax_hetccl._world")
from jax_hetccl._errors import HetcclError, PeerLostError

def say(**facts):
    print(json.dumps(facts), flush=True)

def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())

name = os.environ["HETCCL_CLUSTER"] + "/" + os.environ["HETCCL_PROCESS"]
"""


class Job:
    """Runs one script in every process of some clusters."""

    def __init__(self, clusters: str, script: str, directory: Path, devices: int = 1, **environ: str) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HETCCL_", "JAX_", "XLA_"))}
        common = {
            **kept,
            "PYTHONPATH": os.pathsep.join(IN_PLACE),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "HETCCL_COORDINATOR": f"127.0.0.1:{reserve_port()}",
            "HETCCL_CLUSTERS": clusters,
            "HETCCL_SECRET": SECRET,
            "HETCCL_JOIN_TIMEOUT": "60",
            **environ,
        }
        code = PREAMBLE + textwrap.dedent(script)
        for cluster, _, count in (part.partition(":") for part in clusters.split(",")):
            for process in range(int(count)):
                name = f"{cluster}/{process}"
                self.processes[name] = subprocess.Popen(
                    [sys.executable, "-c", code],
                    env={**common, "HETCCL_CLUSTER": cluster, "HETCCL_PROCESS": str(process)},
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=directory,
                )  # fmt: skip

    def read(self, name: str) -> dict[str, Any]:
        """The next line a process said; fails with its errors if it ended instead."""
        process = self.processes[name]
        line = process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            pytest.fail(f"{name} ended with {process.wait(10)}:\n{process.stderr.read()}")  # type: ignore[union-attr]
        return json.loads(line)

    def finish(self, within: float = 60) -> dict[str, tuple[int, str]]:
        """Waits for all; returns exit status and error output by name."""
        deadline = time.monotonic() + within
        ended = {}
        for name, process in self.processes.items():
            _, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            ended[name] = (process.returncode, errors)
        return ended

    def kill(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def run(tmp_path) -> Iterator[Any]:
    jobs: list[Job] = []

    def start(clusters: str, script: str, **settings: Any) -> Job:
        jobs.append(Job(clusters, script, tmp_path, **settings))
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill()


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_three_processes_two_clusters_two_worlds_in_a_row(run, transport):
    job = run(
        "left:2,right:1",
        """
        for turn in range(2):
            world = w.initialize(axes={"data": 6})
            pairs = [(a, b) for a in range(world.size) for b in range(world.size)
                     if world.cluster_of_rank(a) != world.cluster_of_rank(b)]
            threads = [threading.Thread(target=world.ensure_channels, args=(pairs,)) for _ in range(3)]
            [t.start() for t in threads]
            [t.join() for t in threads]
            mine = [p for p in pairs if set(p) & set(world.local_ranks)]
            say(
                turn=turn, epoch=world.epoch, size=world.size, repr=repr(world), table=world.table(),
                cluster=world.cluster, process=world.process, axes=world.axes,
                clusters=[[c.name, c.processes, c.devices, c.first_rank, c.platform] for c in world.clusters],
                ranks=[world.rank_of_device(d) for d in jax.local_devices()], local_ranks=world.local_ranks,
                names=[world.rank_name(r) for r in range(world.size)],
                owners=[world.process_of_rank(r) for r in range(world.size)],
                all_open=until(lambda: sorted(world.transports()) == mine),
                transports=sorted(set(world.transports().values())),
                threads=sorted(t.name for t in threading.enumerate() if t.name.startswith("hetccl")),
            )
            world.control.publish("done", turn)
            world.control.collect("done")
            w.shutdown()
            w.shutdown()
            assert w.current() is None
            left = [t.name for t in threading.enumerate() if t.name.startswith("hetccl")]
            assert not left, left
        """,
        devices=2,
        HETCCL_TRANSPORT=transport,
    )
    for turn in range(2):
        said = {name: job.read(name) for name in job.processes}
        assert len({facts["epoch"] for facts in said.values()}) == 1
        for name, facts in said.items():
            assert facts["turn"] == turn and facts["size"] == 6 and facts["axes"] == {"data": 6}
            assert facts["clusters"] == [["left", 2, 4, 0, "cpu"], ["right", 1, 2, 4, "cpu"]]
            assert facts["names"] == [f"{p} rank {r}" for r, p in enumerate(
                ["left/0", "left/0", "left/1", "left/1", "right/0", "right/0"])]  # fmt: skip
            assert facts["owners"] == [[0, 0], [0, 0], [0, 1], [0, 1], [1, 0], [1, 0]]
            expected = {"left/0": [0, 1], "left/1": [2, 3], "right/0": [4, 5]}[name]
            assert facts["ranks"] == facts["local_ranks"] == expected
            assert facts["all_open"] and facts["transports"] == (["tcp"] if transport == "tcp" else ["shm"])
            assert facts["repr"].startswith(f"World({name} of [left: 4 cpu, right: 2 cpu], epoch=")
            assert "right" in facts["table"]
            hosted = ["hetccl-coordinator"] if name == "left/0" else []
            assert facts["threads"] == sorted(
                ["hetccl-accept", "hetccl-control", "hetccl-failure", "hetccl-take_0", *hosted]
            )
    for name, (status, errors) in job.finish().items():
        assert status == 0, f"{name}: {errors}"


def test_a_killed_process_fails_the_other_clusters(run):
    job = run(
        "left:1,right:1,third:1",
        """
        world = w.initialize(axes="data")
        world.ensure_channels((a, b) for a in range(3) for b in range(3) if a != b)
        assert until(lambda: len(world.transports()) == 4)
        world.control.publish("ready", 1)
        world.control.collect("ready")
        say(ready=True)
        if name == "right/0":
            time.sleep(60)
        start = time.monotonic()
        assert until(lambda: world.failure)
        try:
            w.check()
        except PeerLostError as error:
            say(error=str(error), waited=time.monotonic() - start)
        try:
            world.ensure_channels([(0, 1)])
        except PeerLostError:
            say(again=True)
        """,
    )
    for name in job.processes:
        job.read(name)
    job.processes["right/0"].kill()
    killed = time.monotonic()
    errors = [job.read(name)["error"] for name in ("left/0", "third/0")]
    assert time.monotonic() - killed < 2
    assert errors[0] == errors[1] and "right/0" in errors[0]
    assert all(job.read(name)["again"] for name in ("left/0", "third/0"))
    ended = job.finish(20)
    assert [ended[name][0] for name in ("left/0", "third/0")] == [0, 0], ended


def test_a_killed_process_does_not_hold_up_the_rest_of_its_cluster(run):
    """JAX alone would wait 100 s for it at exit and then abort."""
    job = run(
        "left:2,right:1",
        """
        import sys
        world = w.initialize()
        world.ensure_channels([(0, 2), (1, 2), (2, 0), (2, 1)])
        world.control.publish("ready", 1)
        world.control.collect("ready")
        say(ready=True)
        if name == "left/1":
            time.sleep(60)
        assert until(lambda: world.failure)
        sys.exit(17)
        """,
    )
    for name in job.processes:
        job.read(name)
    job.processes["left/1"].kill()
    killed = time.monotonic()
    ended = job.finish(20)
    assert [ended[name][0] for name in ("left/0", "right/0")] == [17, 17], ended
    assert time.monotonic() - killed < 6


def test_an_end_without_shutdown_is_in_order(run):
    job = run(
        "left:1,right:1",
        """
        world = w.initialize()
        world.ensure_channels([(0, 1), (1, 0)])
        assert until(lambda: len(world.transports()) == 2)
        world.control.publish("ready", 1)
        world.control.collect("ready")
        if name == "left/0":
            assert until(lambda: world.control.state_of(1) == "departed")
            time.sleep(1.5)
            say(failure=str(world.failure))
        """,
    )
    assert job.read("left/0") == {"failure": "None"}
    assert all(status == 0 for status, _ in job.finish(20).values())


def test_jax_used_too_early_is_a_clear_error_and_the_others_do_not_wait_for_ever(run):
    job = run(
        "left:2,right:1",
        """
        if name == "left/1":
            jax.devices()
        try:
            w.initialize()
        except HetcclError as error:
            say(kind=type(error).__name__, error=str(error))
        os._exit(0)
        """,
        HETCCL_JOIN_TIMEOUT="15",
    )
    early, other = job.read("left/1"), job.read("right/0")
    assert early["kind"] == "RendezvousError" and "call hetccl.initialize() before" in early["error"]
    assert other["kind"] == "PeerLostError" and "'devices': left/1" in other["error"]


def test_the_users_own_jax_world_is_used_or_refused(run):
    job = run(
        "left:1,right:2",
        f"""
        if name == "left/0":
            jax.distributed.initialize("127.0.0.1:{reserve_port()}", 1, 0)
        elif name == "right/0":
            jax.distributed.initialize("127.0.0.1:{reserve_port()}", 1, 0)
        try:
            w.initialize()
        except HetcclError as error:
            say(kind=type(error).__name__, error=str(error))
        os._exit(0)
        """,
        HETCCL_JOIN_TIMEOUT="15",
    )
    refused, used = job.read("right/0"), job.read("left/0")
    assert refused["kind"] == "AgreementError" and "as process 0 of 1, but HETCCL_CLUSTERS" in refused["error"]
    assert used["kind"] == "PeerLostError" and "'devices': right/0" in used["error"]


def record(**facts: Any) -> dict[str, Any]:
    return {"platform": "cpu", "kinds": ["cpu"], "jax": "1", "total": 2, "positions": [0, 1], **facts}


def control_of(*clusters: int) -> Any:
    members = []
    for cluster, count in enumerate(clusters):
        for process in range(count):
            name = f"c{cluster}"
            members.append(
                SimpleNamespace(
                    index=len(members),
                    cluster=cluster,
                    cluster_name=name,
                    process=process,
                    name=f"{name}/{process}",
                )
            )
    return SimpleNamespace(members=tuple(members))


def test_ranks_follow_clusters_then_positions():
    records = {
        0: record(total=3, positions=[0, 2]),
        1: record(total=3, positions=[1]),
        2: record(kinds=["x"]),
    }
    clusters, owner = island.assemble(control_of(2, 1), records)
    assert owner == {0: 0, 2: 0, 1: 1, 3: 2, 4: 2}
    assert [(c.first_rank, c.devices, c.processes, c.device_kinds) for c in clusters] == [
        (0, 3, 2, ("cpu",)), (3, 2, 1, ("x",)),
    ]  # fmt: skip


@pytest.mark.parametrize("fact", [{"total": 3}, {"platform": "gpu"}, {"jax": "2"}])
def test_processes_of_one_cluster_must_describe_the_same(fact):
    with pytest.raises(AgreementError, match=f"cluster c0 is not one JAX world: {next(iter(fact))}"):
        island.assemble(control_of(2), {0: record(positions=[0]), 1: record(positions=[1], **fact)})


def test_devices_without_an_owner_are_an_error():
    with pytest.raises(HetcclError, match="do not own all of its devices"):
        island.assemble(control_of(1), {0: record(positions=[0])})


class EngineTwin:
    """Stands for the engine where only its life matters; writes down in `calls` what happens to it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def wait_failure(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, 0.05))

    def set_rank_name(self, rank: int, name: str) -> None:
        self.calls.append("named")

    def set_local_device(self, ordinal: int, rank: int, platform: str) -> None:
        pass

    def failure(self) -> None:
        return None

    def stats(self) -> dict[str, int]:
        return {}

    def close(self, timeout_s: float) -> None:
        self.calls.append("closed")


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What happens to the engine, by `EngineTwin` and by the world that uses it."""
    made: list[str] = []
    monkeypatch.setattr(world, "_use_engine", lambda engine: made.append("used" if engine else "unused"))
    return made


def alone() -> Any:
    return config("solo/0", reserve_port(), clusters="solo:1")


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("hetccl")]


def test_the_engine_is_closed_before_it_is_taken_from_the_handlers(calls, monkeypatch):
    made = world.form(alone(), lambda *_: EngineTwin(calls))
    close = made._channels.close

    def fails() -> None:
        close()
        raise OSError(9, "by the test")

    monkeypatch.setattr(made._channels, "close", fails)
    made.close()  # the rest is closed all the same
    assert calls[-2:] == ["closed", "unused"] and "used" in calls
    assert not threads()


@pytest.mark.parametrize("step", ["World", "_introduce", "_use_engine"])
def test_a_world_that_cannot_be_formed_leaves_nothing(calls, monkeypatch, step):
    def fails(*_: Any) -> None:
        raise RuntimeError("by the test")

    monkeypatch.setattr(world, step, fails)
    with pytest.raises(RuntimeError, match="by the test"):
        world.form(alone(), lambda *_: EngineTwin(calls))
    assert calls[-1] == "closed" and "used" not in calls
    assert not threads()


def test_without_a_world():
    assert world.current() is None
    world.shutdown()
    for call in (world.world, world.check):
        with pytest.raises(HetcclError, match="call hetccl.initialize"):
            call()
    with pytest.raises(ConfigError, match="HETCCL_COORDINATOR"):
        world.initialize(cluster="left")
    assert world.current() is None
