"""The programs in examples/, run through the launcher as their docstrings say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jax_hetccl
from harness import compiler

_ROOT = Path(__file__).resolve().parents[1]
# Where the package under test is: installed, or the source tree. A fresh clone has no built module in the latter.
_PACKAGE = str(Path(jax_hetccl.__file__).resolve().parents[1])


def environ() -> dict[str, str]:
    """For a launcher that finds the package under test, and no settings of ours."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HETCCL_")}
    path = os.pathsep.join(filter(None, [_PACKAGE, kept.get("PYTHONPATH")]))
    return compiler.hurried({**kept, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"})


def _run(program: str, *clusters: str, options: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Runs an example; returns its lines that tell of a loss, as (process, text)."""
    named = [word for cluster in clusters for word in ("--cluster", cluster)]
    command = [sys.executable, "-m", "jax_hetccl.cli", "run", *named, "--time-limit", "150", "--", "python"]
    done = subprocess.run(
        [*command, str(_ROOT / "examples" / program), *options],
        env=environ(), capture_output=True, check=False, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [re.fullmatch(r"\[(\S+)\] (.*)", line) for line in done.stdout.splitlines()]
    return [(match[1], match[2]) for match in lines if match and "loss" in match[2]]


@pytest.mark.parametrize("right", ["right=2x1@cpu", "right=1x1@cpu"])
def test_train_data_parallel(right: str) -> None:
    lines = _run("train_data_parallel.py", "left=1x2", right)
    last = dict(lines)
    assert sorted(last) == ["left/0"] + [f"right/{i}" for i in range(int(right[6]))]
    assert len(set(last.values())) == 1, "every process must end with the same values"
    match = re.search(r"loss (\S+), w \[(.*)\]", last["left/0"])
    assert match is not None
    assert float(match[1]) < 1e-8
    assert [float(word) for word in match[2].split()] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_train_transformer() -> None:
    lines = _run("train_transformer.py", "left=2x1", "right=1x2", options=("--steps", "41"))
    losses = {
        int(step): float(loss) for _, text in lines for step, loss in re.findall(r"step +(\d+)  loss (\S+)", text)
    }
    assert {name for name, _ in lines} == {"left/0"}
    assert list(losses) == [0, 20, 40]
    assert losses[40] < 0.7 * losses[0]


def test_train_diloco() -> None:
    options = ("--steps", "30", "--every", "10", "--overlap", "--wire-dtype", "int8")
    lines = _run("train_diloco.py", "left=1x1", "right=1x2", options=options)
    losses = [float(match[1]) for _, text in lines if (match := re.fullmatch(r"step +\d+  loss (\S+)", text))]
    assert {name for name, _ in lines} == {"left/0"}
    assert len(losses) == 3
    assert losses[2] < losses[0] < 3.5  # a guess among 97 characters has 4.6


def test_pipeline_two_clusters() -> None:
    lines = _run("pipeline_two_clusters.py", "left=1x1", "right=1x1")
    assert {name for name, _ in lines} == {"right/0"}
    losses = [float(match[1]) for _, text in lines if (match := re.fullmatch(r"step \d+: loss (\S+)", text))]
    assert len(losses) == 3
    assert losses[-1] < 0.5 * losses[0]
    assert lines[-1][1] == "losses equal those of one device: True"
