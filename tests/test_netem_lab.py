"""Runs the tests of bad links with `tc netem` in a lab whose kernel has it, if this one has not."""

from __future__ import annotations

import sys

import pytest

from harness import lab, network

_WHY = "import sys; sys.path.insert(0, 'tests'); from harness import network; print(network.lacking('netem'))"


@pytest.mark.timeout(700)
def test_netem() -> None:
    if not (here := network.lacking("netem")):
        pytest.skip("this kernel has netem: test_faults_network.py runs with it")
    if lab.MISSING:
        pytest.skip(f"{here}, and {lab.MISSING}")
    asked = lab.run(sys.executable, "-c", _WHY, limit_s=60)
    assert asked.returncode == 0, asked.stdout
    if there := asked.stdout.strip():
        pytest.skip(f"the lab's kernel has no netem either: {there}")
    lab.check_tests("--timeout=300", "tests/test_faults_network.py", "-k", "netem", limit_s=600)
