"""hetccl.sync, broadcast, check_replicas and barrier over clusters that shard the same arrays differently."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
from meeting import SECRET, free_port

from harness import platforms
from harness.layout import Layout
from harness.process import IN_PLACE, TESTS
from harness.pythons import other_pythons

SCENARIOS = (
    "operations",
    "narrow_floats",
    "other_types",
    "weighted",
    "step",
    "beside_spanning_axes",
    "eager_and_donated",
    "compiled_again",
    "names",
    "explicit_axes",
    "no_needless_gather",
    "refusals",
    "replicas",
    "barriers",
)
# Devices of each process of each cluster.
LAYOUTS = ("4/3", "1+1/1", "1+1/2/1")
MORE_LAYOUTS = ("1/1", "2/1", "2+2/3/4")  # with --soak
NAMES = ("left", "right", "third")


@functools.cache
def run(
    layout: str, scenarios: tuple[str, ...], pythons: tuple[str, ...] = (sys.executable,)
) -> dict[str, dict[str, str]]:
    """Runs scenarios in one world: process name -> scenario -> what came of it."""
    clusters = [[int(n) for n in part.split("+")] for part in layout.split("/")]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HETCCL_", "JAX_", "XLA_", "PYTHONPATH"))}
    common = {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(TESTS), *IN_PLACE]),
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "HETCCL_COORDINATOR": f"127.0.0.1:{free_port()}",
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
            env = {**common, **placed[c, p], "HETCCL_CLUSTER": NAMES[c], "HETCCL_PROCESS": str(p)}
            command = [pythons[c % len(pythons)], str(TESTS / "sync_worker.py"), str(c), str(p), layout, *scenarios]
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


@pytest.mark.parametrize("layout", LAYOUTS + MORE_LAYOUTS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_sync(layout: str, scenario: str, soak: bool) -> None:
    if layout in MORE_LAYOUTS and not soak and not platforms.chosen():
        pytest.skip("long: --soak")
    judge(run(layout, SCENARIOS), scenario)


def test_sync_of_different_things_is_an_error_in_both() -> None:
    judge(run("2/1", ("differing",)), "differing")


@pytest.mark.parametrize("layout", ["3/2", "1+1/1"])
def test_a_cluster_that_dies_ends_the_others(layout: str) -> None:
    answers = run(layout, ("one_dies",))
    judge({name: said for name, said in answers.items() if not name.startswith("right")}, "one_dies")


@pytest.mark.skipif(not other_pythons(), reason="HETCCL_TEST_PYTHONS names no two interpreters")
@pytest.mark.parametrize("scenario", ("operations", "weighted", "step", "beside_spanning_axes", "replicas"))
def test_sync_of_two_jax_versions(scenario: str) -> None:
    judge(run("4/3", ("operations", "weighted", "step", "beside_spanning_axes", "replicas"), other_pythons()), scenario)
