"""hetccl.sync, broadcast, check_replicas and barrier over clusters that shard the same arrays differently."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from meeting import SECRET

from harness import compiler, platforms
from harness.layout import Layout
from harness.process import IN_PLACE, TESTS
from harness.pythons import other_pythons
from jax_hetccl.launch.ports import reserve_port

# Devices of each process of each cluster -> what runs there; with --soak everything runs everywhere.
CELLS: dict[str, tuple[str, ...]] = {
    # fsdp=4, tp=2 in one cluster, fsdp=3 in the other.
    "8/3": ("operations", "weighted", "gradients", "bytes_on_the_wire", "no_needless_gather", "step"),
    # Three clusters, one of several processes: one cluster computes each element.
    "1+1/2/1": ("operations", "weighted", "bytes_on_the_wire", "replicas", "barriers", "batches", "buckets"),
    "1+1/1": ("operations", "step", "beside_spanning_axes", "replicas", "bytes_on_the_wire", "in_the_backward_loop"),
    "2/1": ("narrow_floats", "other_types", "control_flow", "odd_leaves", "eager_and_donated", "compiled_again",
            "names", "explicit_axes", "refusals", "gradients", "buckets", "starts_early", "in_the_backward_loop"),
}  # fmt: skip
MORE_LAYOUTS = ("1/1", "4/3", "2+2/3/4")  # with --soak
# These look at whole arrays, which a process of several does not hold.
ONE_PROCESS = ("gradients", "control_flow", "odd_leaves")
MIXED = (
    "operations",
    "weighted",
    "gradients",
    "step",
    "beside_spanning_axes",
    "replicas",
    "buckets",
    "in_the_backward_loop",
)
NAMES = ("left", "right", "third")


@functools.cache
def run(
    layout: str,
    scenarios: tuple[str, ...],
    pythons: tuple[str, ...] = (sys.executable,),
    more: tuple[tuple[str, str], ...] = (),
    worker: str = "sync_worker.py",
    quick: bool = True,
) -> dict[str, dict[str, str]]:
    """Runs scenarios in one world: process name -> scenario -> what came of it. ``quick``: see `harness.compiler`."""
    clusters = [[int(n) for n in part.split("+")] for part in layout.split("/")]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HETCCL_", "JAX_", "XLA_", "PYTHONPATH"))}
    common = {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *IN_PLACE]),
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "HETCCL_COORDINATOR": f"127.0.0.1:{reserve_port()}",
        "HETCCL_CLUSTERS": ",".join(f"{NAMES[c]}:{len(p)}" for c, p in enumerate(clusters)),
        "HETCCL_SECRET": SECRET,
        "HETCCL_JOIN_TIMEOUT": "90",
        "HETCCL_TIMEOUT": "40",
        "HETCCL_ARRIVAL_TIMEOUT": "60",
    }
    parsed = Layout.parse(layout)
    placed = {(c, p): platforms.environment(parsed, c, p) for c, p, _ in parsed.members()}  # may skip the test
    children = {}
    for c, processes in enumerate(clusters):
        for p in range(len(processes)):
            env = {**common, **placed[c, p], **dict(more), "HETCCL_CLUSTER": NAMES[c], "HETCCL_PROCESS": str(p)}
            if quick and not platforms.chosen():
                env = compiler.hurried(env, mixed=len(pythons) > 1)
            command = [pythons[c % len(pythons)], str(TESTS / worker), str(c), str(p), layout, *scenarios]
            children[f"{NAMES[c]}/{p}"] = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
    answers = {}
    try:
        for name, child in children.items():
            out, err = child.communicate(timeout=400)
            lines = out.strip().splitlines()
            answers[name] = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {"": err[-4000:]}
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    return answers


def judge(answers: dict[str, dict[str, str]], scenario: str) -> None:
    """Every process is content, and clusters that say what they got got the same."""
    got = {name: said.get(scenario, f"no answer; {said.get('', '')}") for name, said in answers.items()}
    wrong = {name: text for name, text in got.items() if not text.startswith("ok")}
    assert not wrong, "\n".join(f"--- {name}\n{text}" for name, text in wrong.items())
    digests = {text for text in got.values() if text != "ok"}
    assert len(digests) <= 1, got


@dataclasses.dataclass(frozen=True)
class Table:
    """Which scenarios run in which layouts.

    Attributes:
        cells: scenarios by layout.
        one_process: scenarios that need clusters of one process.
        more_layouts: with ``--soak``, in which every scenario runs in every layout.
    """

    cells: dict[str, tuple[str, ...]]
    one_process: tuple[str, ...]
    more_layouts: tuple[str, ...] = ()

    def scenarios(self, layout: str, soak: bool) -> tuple[str, ...]:
        """What runs in a layout, in one world."""
        if not soak and not platforms.chosen():
            return self.cells[layout]
        everywhere = dict.fromkeys(name for names in self.cells.values() for name in names)
        return tuple(name for name in everywhere if "+" not in layout or name not in self.one_process)

    def parametrize(self, metafunc: pytest.Metafunc) -> None:
        """One test for each scenario of each layout."""
        if {"layout", "scenario"} <= set(metafunc.fixturenames):
            soak = metafunc.config.getoption("--soak")
            layouts = [*self.cells, *(self.more_layouts if soak else ())]
            if platforms.chosen():
                layouts = ["1/1"]  # since GPUs are few
            rows = [(layout, name) for layout in layouts for name in self.scenarios(layout, soak)]
            metafunc.parametrize(("layout", "scenario"), rows)


TABLE = Table(CELLS, ONE_PROCESS, MORE_LAYOUTS)
pytest_generate_tests = TABLE.parametrize


def test_sync(layout: str, scenario: str, soak: bool) -> None:
    # One of them compiles as users do.
    judge(run(layout, TABLE.scenarios(layout, soak), quick=layout != "2/1"), scenario)


@pytest.mark.parametrize("what", ["unlike", "differing"])
def test_different_things_are_an_error_in_all(what: str) -> None:
    judge(run("2/1", ("unlike", "differing")), what)


def test_programs_from_a_persistent_cache(tmp_path: Path) -> None:
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY": "1",
    }
    for hits in ("0", "2"):
        judge(run("2/2", ("cached",), more=(*settings.items(), ("SYNC_WORKER_HITS", hits))), "cached")


@pytest.mark.parametrize("layout", ["3/2", "1+1/1"])
def test_a_cluster_that_dies_ends_the_others(layout: str) -> None:
    answers = run(layout, ("one_dies",))
    judge({name: said for name, said in answers.items() if not name.startswith("right")}, "one_dies")


@pytest.mark.skipif(not other_pythons(), reason="HETCCL_TEST_PYTHONS names no two interpreters")
@pytest.mark.parametrize("scenario", MIXED)
def test_sync_of_two_jax_versions(scenario: str) -> None:
    judge(run("2/1", MIXED, other_pythons()), scenario)
