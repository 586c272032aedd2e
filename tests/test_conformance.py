"""lax over a spanning axis does what JAX's own tests say that lax does: many programs, against one world."""

from __future__ import annotations

import pytest

from harness.batches import Batches
from harness.cells import Cell

_SUBJECTS = ("reduce", "move", "autodiff", "vmap", "control", "meshes", "calls", "rejects")


@pytest.mark.batched(*(f"conform_{subject}" for subject in _SUBJECTS))
def test_conformance(cell: Cell, batches: Batches) -> None:
    batches.check(cell)
