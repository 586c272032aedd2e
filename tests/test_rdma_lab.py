"""Runs `tests/rdma` where there is software RDMA: in this kernel, or in a lab that starts one of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import lab

HERE = Path("/sys/class/infiniband/rxe0").exists()


@pytest.mark.skipif(not HERE and bool(lab.MISSING), reason=f"no device rxe0 in this kernel, and {lab.MISSING}")
@pytest.mark.timeout(700)  # one core, which other tests use too
def test_over_software_rdma() -> None:
    said = lab.check_tests("--timeout=240", "--confcutdir=tests/rdma", "tests/rdma", limit_s=600, inside=not HERE)
    assert "no software RDMA here" not in said, said
