"""Runs tests in another kernel, which has what this one lacks. CONTRIBUTING.md has the details."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A program that runs a command, after `-t SECONDS`, in a kernel of its own with this machine's files.
LAB = Path(os.environ.get("RDMA_LAB") or ROOT.parent / "shared/rdma-lab/rxe-vm.sh")
MISSING = "" if LAB.exists() else f"there is no lab at {LAB} (RDMA_LAB names another one)"


def run(*command: str, limit_s: int, inside: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a command in the lab, or in this kernel if not `inside`; stdout has both of its streams."""
    lab = [str(LAB), "-t", str(limit_s)] if inside else []
    return subprocess.run(
        [*lab, *command],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith(("HETCCL_", "PYTEST_"))}, timeout=limit_s + 60,
    )  # fmt: skip


def check_tests(*arguments: str, limit_s: int, inside: bool = True) -> str:
    """Runs pytest there: all must pass, and one at least. Returns what it printed."""
    # -P: the package is where these tests found it, which need not be the source tree.
    pytest_ = [sys.executable, "-P", "-m", "pytest", "-q", "-rs", "--color=no", "-p", "no:cacheprovider"]
    ran = run(*pytest_, *arguments, limit_s=limit_s, inside=inside)
    assert ran.returncode == 0, ran.stdout
    assert re.search(r"\d+ passed", ran.stdout), ran.stdout
    print(ran.stdout)
    return ran.stdout
