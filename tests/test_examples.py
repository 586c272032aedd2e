"""The programs in examples/, run through the launcher as their docstrings say."""

from __future__ import annotations

import os
import re
import shutil
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
    return [(process, text) for process, text in _lines(program, *clusters, options=options) if "loss" in text]


def _lines(program: str, *clusters: str, options: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Runs an example; returns its lines as (process, text)."""
    named = [word for cluster in clusters for word in ("--cluster", cluster)]
    command = [sys.executable, "-m", "jax_hetccl.cli", "run", *named, "--time-limit", "150", "--", "python"]
    done = subprocess.run(
        [*command, str(_ROOT / "examples" / program), *options],
        env=environ(), capture_output=True, check=False, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [re.fullmatch(r"\[(\S+)\] (.*)", line) for line in done.stdout.splitlines()]
    return [(match[1], match[2]) for match in lines if match]


def _losses(lines: list[tuple[str, str]]) -> dict[str, list[float]]:
    """Each process's losses, in the order of its lines."""
    found: dict[str, list[float]] = {}
    for process, text in lines:
        if match := re.match(r"step \d+: loss ([^\s,]+)", text):
            found.setdefault(process, []).append(float(match[1]))
    return found


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
    lines = _run("train_diloco.py", "left=2x1", "right=1x2", options=options)
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


@pytest.mark.parametrize(("program", "added"), [("flax_shard_map.py", 1), ("flax_jit.py", 3), ("fsdp.py", 3)])
def test_stock_program_and_some_lines(program: str, added: int, tmp_path: Path) -> None:
    """Without the lines of ours the file is a stock program, which one world of as many devices runs with the same losses."""
    body = (_ROOT / "examples" / program).read_text().split('"""', 2)[2].splitlines(keepends=True)
    ours = [line.strip() for line in body if "hetccl" in line]
    assert ours[0] == "import jax_hetccl as hetccl"
    assert len(ours) == 1 + added
    stock = tmp_path / program
    stock.write_text("".join(line for line in body if "hetccl" not in line))
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HETCCL_", "XLA_", "PYTHONPATH"))}
    with subprocess.Popen(
        [sys.executable, str(stock)],
        env=compiler.hurried({**env, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    ) as world:  # fmt: skip
        lines = _run(program, "left=1x2", "right=1x1")
        out, err = world.communicate(timeout=200)
    assert world.returncode == 0, err
    (wanted,) = _losses([("world", line) for line in out.splitlines()]).values()
    found = _losses(lines)
    assert sorted(found) == ["left/0", "right/0"]
    assert len(wanted) >= 30 and wanted[-1] < 0.5 * wanted[0]
    for losses in found.values():
        assert losses == pytest.approx(wanted, rel=1e-3, abs=2e-6)  # they are printed with six digits


def test_unequal_clusters() -> None:
    """The slower cluster gets fewer rows, in every process at the same step, and training does not change."""
    options = ("--steps", "12", "--every", "4", "--width", "128")
    lines = _run("unequal_clusters.py", "fast=1x2", "slow=1x1", options=(*options, "--slow", "slow:12"))
    found = _losses(lines)
    rows = {p: [m[1] for q, text in lines if q == p and (m := re.search(r"rows ([\d+]+)", text))] for p in found}
    assert rows["fast/0"] == rows["slow/0"]
    split = [tuple(map(int, both.split("+"))) for both in rows["fast/0"]]
    assert split[:4] == [(128, 64)] * 4
    assert all(fast + slow == 192 and fast % 16 == 0 and slow % 8 == 0 for fast, slow in split)
    assert split[4][0] > 128
    (wanted,) = _losses(
        _run("unequal_clusters.py", "all=1x3", options=(*options[:2], "--every", "0", *options[4:]))
    ).values()
    for losses in found.values():
        assert losses == pytest.approx(wanted, rel=1e-3, abs=2e-6)


def test_checkpoint(tmp_path: Path) -> None:
    """What goes on from a checkpoint has, bit for bit, what a run without a stop has, in every cluster."""
    options = ("--directory", str(tmp_path / "saved"), "--every", "3", "--steps", "8")
    whole = _lines("checkpoint.py", "left=2x1", "right=1x1", options=options)
    assert ("right/0", "goes on from step 0") in whole
    assert sorted(d.name for d in (tmp_path / "saved").iterdir() if d.name.isdigit()) == ["3", "6"]
    shutil.rmtree(tmp_path / "saved" / "6")  # as if it had ended before
    rest = _lines("checkpoint.py", "left=2x1", "right=1x1", options=options)
    assert {text for _, text in rest if "goes on" in text} == {"goes on from step 3"}
    states = {int(m[1]): m[0] for _, text in whole if (m := re.match(r"step (\d+): .*", text))}
    assert sorted(states) == list(range(1, 9))
    for process in ("left/0", "right/0"):
        assert [text for p, text in rest if p == process and "state" in text] == [states[i] for i in range(4, 9)]
        assert [text for p, text in whole if p == process and "state" in text] == [states[i] for i in range(1, 9)]


def test_prefill_decode() -> None:
    lines = _lines("prefill_decode.py", "prefill=1x1", "decode=1x1")
    said = [text for process, text in lines if process == "decode/0"]
    assert [text for text in said if "equal" in text] == ["tokens equal those of one device: True"] * 3
    tokens = [text.split(":")[1] for text in said if text.startswith("request")]
    assert len(set(tokens)) == 3
