"""Runs `tests/rdma` where there is software RDMA: in this kernel, or in a lab that starts one of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A program that runs a command in a kernel with the devices rxe0 and rxe1; CONTRIBUTING.md has the details.
LAB = Path(os.environ.get("RDMA_LAB") or ROOT.parent / "shared/rdma-lab/rxe-vm.sh")
HERE = Path("/sys/class/infiniband/rxe0").exists()
LIMIT_S = 300


@pytest.mark.skipif(
    not (HERE or LAB.exists()),
    reason=f"no device rxe0 in this kernel, and no lab at {LAB} (RDMA_LAB names another one)",
)
def test_over_software_rdma() -> None:
    lab = [] if HERE else [str(LAB), "-t", str(LIMIT_S)]
    # -P: the package is where these tests found it, which need not be the source tree.
    pytest_ = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-rs",
        "--color=no",
        "-p",
        "no:cacheprovider",
        "--timeout=150",
    ]
    ran = subprocess.run(
        [*lab, *pytest_, "--confcutdir=tests/rdma", "tests/rdma"],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith(("HETCCL_", "PYTEST_"))}, timeout=LIMIT_S + 60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"\d+ passed", ran.stdout) and "no software RDMA here" not in ran.stdout, ran.stdout
    print(ran.stdout)
