"""Tests with software RDMA. They need two devices, rxe0 and rxe1, whose networks reach each other: CONTRIBUTING.md.

`tests/test_rdma_lab.py` runs them in a kernel that has these, on machines that have that kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
import pytest

# Started by itself, without the fixtures of the other tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@pytest.fixture(autouse=True)
def _devices() -> Iterator[None]:
    if lacking := lab.lacking():
        pytest.skip(f"no software RDMA here ({lacking}); tests/test_rdma_lab.py runs this in a kernel that has it")
    yield
    for interface in lab.DEVICES.values():
        lab.turn(interface, "up")


@pytest.fixture(scope="session")
def pyverbs_peer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module of this name. Debian's pyverbs serves any Python of the version it is built for."""
    try:
        import pyverbs.device
    except ImportError:
        if not lab.DEBIAN_PYVERBS.exists():
            pytest.skip("no pyverbs: apt-get install python3-pyverbs")
        folder = tmp_path_factory.mktemp("pyverbs")
        (folder / "pyverbs").symlink_to(lab.DEBIAN_PYVERBS)
        sys.path.insert(0, str(folder))
        try:
            import pyverbs.device  # noqa: F401
        except ImportError as error:
            pytest.skip(f"Debian's pyverbs is for another Python: {error}")
    import pyverbs_peer

    return pyverbs_peer
