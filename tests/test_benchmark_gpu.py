"""What benchmarks/gpu.py and multi_gpu.py make of what they measure."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harness import compiler
from harness.process import IN_PLACE

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_order_of_a_compiled_program(parts):
    text = """
  %a = (u32[4]) custom-call(%c), custom_call_target="hetccl_exchange_start"
  %b = bf16[8,8] custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %d = (u32[4]) custom-call(%a), custom_call_target="hetccl_exchange_done"
"""
    assert parts("gpu_bench.overlap").order(text) == "SgD"


def test_overlap_of_spans(parts):
    ms = 1e6
    found = parts("gpu_bench.overlap").summary(
        [(0, 4 * ms), (2 * ms, 6 * ms), (8 * ms, 9 * ms)], [(5 * ms, 8.5 * ms), (20 * ms, 21 * ms)]
    )
    assert found == {"copies_ms": 7.0, "kernels_ms": 4.5, "both_ms": 1.5}


def test_ratios_take_what_was_measured(parts):
    report = parts("gpu_bench.report")
    big = 256 << 20
    found = {
        "limits": {"both": {"gb_per_s": 40.0}},
        "hetccl cuda+cuda auto": {
            "send_recv": [{"bytes": big, "gb_per_s": 38.0}],
            "psum_loop": [{"bytes": 4096, "median_us": 50.0}],
            "psum": [{"bytes": 4096, "gb_per_s": 1.0}],
        },
        "gloo": {"skipped": "not here"},
    }
    ratios = report.ratios(found)
    assert ratios["send_recv 256 MB / both-ways pinned rate"]["is"] == pytest.approx(0.95)
    assert ratios["psum 4 KB in a loop, us"] == {"is": 50.0, "wanted": 60, "more_is_better": False}
    assert len(ratios) == 2
    r = report.overlap_row({"exchange": 0.010, "products": 0.020, "both": 0.021, "order": "SgD"})
    assert r["hidden_part"] == pytest.approx(0.9) and r["sum_ms"] == pytest.approx(30.0) and r["order"] == "SgD"


@pytest.mark.parametrize("op", ["psum", "psum_scatter", "all_gather", "swap"])
def test_expected_values(parts, op):
    """Both ranks' expectations fit together."""
    expected = parts("gpu_bench.programs").expected
    zero, one = (expected(op, 64, rank) for rank in (0, 1))
    mine = np.arange(16) % 13 + 1
    if op == "psum_scatter":
        assert np.array_equal(np.concatenate([zero, one]), 2 * mine + 1)
    elif op == "swap":
        assert np.array_equal(zero, mine + 1) and np.array_equal(one, mine)
    else:
        assert np.array_equal(zero, one)


def _run(program: str, *options: str) -> str:
    """A benchmark with clusters of CPU devices; its output."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HETCCL_", "JAX_", "XLA_"))}
    env = compiler.hurried({**kept, "PYTHONPATH": os.pathsep.join([*IN_PLACE, os.environ.get("PYTHONPATH", "")])})
    command = [sys.executable, str(BENCHMARKS / program), *options, "--time-limit", "120"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_short_run_on_cpus(tmp_path):
    """Workers, checks of results, report: the whole path with clusters of CPU devices."""
    ops = "psum_loop,ppermute_loop,send_recv_loop,psum_donated,send_recv"
    _run("gpu.py", "--pairs", "cpu+cpu", "--sizes", "4096", "--ops", ops, "--no-gloo", "--out", str(tmp_path))
    found = json.loads((tmp_path / "gpu.json").read_text())["hetccl cpu+cpu auto"]
    assert not found["failed ops"], found
    assert all(found[op][0]["median_us"] > 0 for op in ("psum_loop", "psum_donated", "send_recv"))
    assert (tmp_path / "gpu.png").stat().st_size > 1000


def test_a_short_run_of_uneven_clusters_on_cpus(tmp_path, soak):
    if not soak:
        pytest.skip("takes a minute; with --soak")
    small = ["--parameters", "1e4", "--rows", "2", "--length", "16", "--steps", "1", "--quick"]
    _run(
        "multi_gpu.py", "--clusters", "cpu:2+cpu:1", "--sizes", "12288", "--transports", "shm",
        "--out", str(tmp_path), *small,
    )  # fmt: skip
    found = json.loads((tmp_path / "multi-gpu.json").read_text())
    steps = ["hetccl cpu:2+cpu:1 shm", "stock cpu:2+cpu:1", "stock cpu:2+cpu:1 first cluster", "overlap cpu:2+cpu:1"]
    steps += ["training cpu:2+cpu:1", "training cpu:2+cpu:1 stock"]
    assert not {k: v for k, v in found.items() if "failed" in v or (k in steps and "skipped" in v)}
    ours = found["hetccl cpu:2+cpu:1 shm"]
    assert [r["segments"] for r in ours["segments"]] == [1, 2, 4, 8]
    assert ours["devices"][0]["ranks"] == found["stock cpu:2+cpu:1"]["devices"][0]["ranks"] == 3
    across, stock = (found[f"training cpu:2+cpu:1{which}"] for which in ("", " stock"))
    assert across["tokens"] == stock["tokens"] == 3 * 2 * 16
    assert across["losses"] == pytest.approx(stock["losses"], rel=1e-4)


def test_what_crosses_a_link(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    crossing = importlib.import_module("multi_gpu").crossing
    assert [crossing(op, 48, (2, 2)) for op in ("psum", "all_gather", "psum_scatter", "ppermute_loop")] == [
        24,
        48,
        12,
        48,
    ]
    assert crossing("psum_loop", 48, (1, 1)) == 48 and crossing("all_gather", 48, (3, 1)) == 144
