"""The demo: its parts by themselves, and a short run of the whole."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from harness import compiler
from harness.process import IN_PLACE
from harness.pythons import other_pythons
from jax_hetccl.demo import compare, corpus, report, traffic
from jax_hetccl.demo.compare import ProcessRecord, RecordFile
from jax_hetccl.demo.main import CLUSTERS
from jax_hetccl.launch import parse_clusters

_PYTHONS = other_pythons()
_LEAVES = {"head": "aa", "body": "bb"}


def _environ() -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HETCCL_")}
    # Never a folder of installed packages, which another interpreter cannot use.
    path = os.pathsep.join(filter(None, [*IN_PLACE, environ.get("PYTHONPATH")]))
    return compiler.hurried({**environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}, mixed=True)


def _record(sent: int = 0) -> ProcessRecord:
    marks = {"first step": 1, "last step": 4, "reductions start": 4, "reductions end": 6}
    return ProcessRecord(
        start={"devices": 1, "platform": "cpu", "python": "3.11.7", "jax": "0.10.2", "flax": "0.12.8"},
        losses=[5.0, 3.0, 2.0, 2.0],
        seconds=[9.0, 0.5, 0.25, 0.25],
        checksums=[dict(_LEAVES)],
        traffic={name: {"bytes_sent": sent * n, "messages": n} for name, n in marks.items()},
        reductions=(2, 0.5),
    )


def _processes() -> dict[str, ProcessRecord]:
    return {"left/0": _record(1000), "left/1": _record(0), "right/0": _record(500)}


def _show(processes: dict[str, ProcessRecord], reference: ProcessRecord, out: Path) -> tuple[int, str]:
    summary = report.summarize(parse_clusters(CLUSTERS), processes, reference, 42.0)
    text = io.StringIO()
    status = report.show(summary, out, Console(file=text, width=200))
    return status, text.getvalue()


# --- the text --------------------------------------------------------------------------------------


def test_encoding_covers_every_character() -> None:
    text = "\n ~é\t!"
    tokens = corpus.encode(text)
    assert "".join(corpus.ALPHABET[t] for t in tokens) == "\n ~\N{REPLACEMENT CHARACTER}    !"
    assert corpus.VOCABULARY == len(set(corpus.ALPHABET)) == 97


def test_batches_are_cut_from_real_text_and_the_same_for_everyone(tmp_path: Path) -> None:
    text = corpus.standard_library(50_000)
    assert "import" in text and len(text) == 50_000
    made = corpus.make(steps=5, rows=6, length=32, text=text)
    made.save(tmp_path / "c.npz")
    loaded = corpus.Corpus.load(tmp_path / "c.npz")
    whole = loaded.rows(3, 0, 6)
    assert whole.shape == (6, 33) and whole.dtype == np.int32
    assert np.array_equal(np.concatenate([made.rows(3, 0, 2), made.rows(3, 2, 6)]), whole)
    clean = corpus.encode(text)
    for row, offset in zip(whole, loaded.offsets[3], strict=True):
        assert np.array_equal(row, clean[offset : offset + 33])
    assert np.array_equal(corpus.make(5, 6, 32, text=text).offsets, made.offsets)


# --- the verdict -----------------------------------------------------------------------------------


def test_a_good_run_passes_and_is_shown(tmp_path: Path) -> None:
    status, text = _show(_processes(), _record(), tmp_path)
    assert status == 0
    assert text.count(compare.combined(_LEAVES)) == 3
    assert "2 parameters bit-identical on 3 devices" in text
    assert re.search(r"left +│ 2 +│ 2 +│ cpu +│ 3.11.7 +│ 0.10.2", text)
    assert "5.0000 → 3.0000" in text
    assert str(tmp_path / "losses.png") in text
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "demo.json").read_text())
    assert figures["steps"]["sent"] == {"left/0": 3000, "left/1": 0, "right/0": 1500}


def test_the_rate_counts_each_byte_once_and_leaves_compilation_out() -> None:
    steps = traffic.between(_processes(), "first step", "last step", 3, 1.0)
    assert (steps.total, steps.messages, steps.repetitions) == (4500, 9, 3)
    assert steps.gigabytes_per_second == pytest.approx(4500e-9)
    assert steps.milliseconds == pytest.approx(1000 / 3)


def test_another_bit_anywhere_fails_and_names_the_leaf(tmp_path: Path) -> None:
    processes = _processes()
    processes["left/1"].checksums[0]["body"] = "cc"
    status, text = _show(processes, _record(), tmp_path)
    assert status == 1
    assert "demo failed: replicas: body differs: left/0 device 0 bb, left/1 device 0 cc" in text


def _change(**changes: Any) -> ProcessRecord:
    record = copy.deepcopy(_record())
    for name, value in changes.items():
        setattr(record, name, value)
    return record


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (_change(checksums=[{"head": "aa"}]), "body differs: left/0 device 0 bb, x/0 device 0 absent"),
        (_change(checksums=[_LEAVES, {"head": "a", "body": "bb"}]), "head differs: .*x/0 device 1 a"),
        (_change(checksums=[]), "no parameters reported by x/0"),
        (_change(losses=[5.0, 3.0, 2.5, 2.0]), "loss of step 2 differs between left/0 and x/0"),
        (_change(losses=[5.0, 3.0]), "loss of step 2 differs between left/0 and x/0"),
    ],
)
def test_replicas_that_differ(record: ProcessRecord, reason: str) -> None:
    check = compare.check_replicas({"left/0": _record(), "x/0": record})
    assert not check.good
    assert re.search(reason, check.detail)


@pytest.mark.parametrize("reference", [[5.0, 3.0, 2.0, 2.002], [5.0, 3.0, 2.0], [5.0, math.nan, 2.0, 2.0]])
def test_curves_that_differ(reference: list[float]) -> None:
    assert not compare.check_curves([5.0, 3.0, 2.0, 2.0], reference).good


def test_curves_that_agree() -> None:
    assert compare.check_curves([5.0, 3.0], [5.0, 3.0009]).good


@pytest.mark.parametrize("losses", [[5.0, 4.9, 5.0], [5.0, 6.0], [math.nan, math.nan]])
def test_a_loss_that_does_not_fall(losses: list[float]) -> None:
    assert not compare.check_loss_falls(losses).good


def test_records_are_read_while_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    file = RecordFile(path)
    assert file.poll().losses == []
    with path.open("w") as writer:
        writer.write('{"event": "step", "loss": 2.5, "seconds": 1}\n{"event": "st')
        writer.flush()
        assert file.poll().losses == [2.5]
        writer.write('ep", "loss": 2.0, "seconds": 1}\n')
    assert file.poll().losses == [2.5, 2.0]


# --- whole runs ------------------------------------------------------------------------------------


def _demo(folder: Path, *options: str) -> dict[str, Any]:
    """Runs the demo in a folder with another jax_hetccl, as a source tree is one. It must succeed; returns its figures."""
    (folder / "jax_hetccl").mkdir()
    (folder / "jax_hetccl" / "__init__.py").write_text("raise ImportError('not the package under test')")
    command = [sys.executable, "-P", "-m", "jax_hetccl.cli", "demo", "--out", str(folder / "out"), *options]
    environ = {key: value for key, value in _environ().items() if key != "PYTHONSAFEPATH"}
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, check=False, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((folder / "out" / "demo.json").read_text())
    assert all(check["good"] for check in figures["checks"])
    assert set(figures["processes"]) == {"left/0", "left/1", "right/0"}
    return figures


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_demo_end_to_end(tmp_path: Path, transport: str, soak: bool) -> None:
    """Of two versions of Python and JAX, if HETCCL_TEST_PYTHONS names two interpreters."""
    if transport == "shm" and not soak:
        pytest.skip("CI runs the whole demo over shared memory")
    steps = 200 if soak else 25
    pythons = [f"{cluster}={path}" for cluster, path in zip(("left", "right"), _PYTHONS, strict=False)]
    options = [word for python in pythons for word in ("--python", python)]
    figures = _demo(tmp_path, "--steps", str(steps), "--transport", transport, *options)
    versions = {process["start"]["jax"] for process in figures["processes"].values()}
    assert len(versions) == (2 if _PYTHONS else 1)
    # A mean gradient for every parameter has to cross in each direction, in every step but the first.
    size = 115_873 * 4
    sent = figures["steps"]["sent"]
    assert sent["right/0"] >= (steps - 1) * size
    assert sent["left/0"] + sent["left/1"] >= (steps - 1) * size
    assert (tmp_path / "out" / "losses.png").stat().st_size > 10_000


def test_the_demo_fails_if_a_process_does(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho it is broken >&2\nexit 5\n")
    broken.chmod(0o755)
    command = [sys.executable, "-m", "jax_hetccl.cli", "demo", "--out", str(tmp_path), "--steps", "5"]
    done = subprocess.run(
        [*command, "--python", f"right={broken}"],
        env=_environ(),
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode == 5
    assert "right/0 failed: exit status 5" in done.stdout
    assert "it is broken" in done.stdout
