"""Meshes with further axes, axis types and partly manual regions."""

import pytest

from harness.batches import Batches
from harness.cells import Cell


@pytest.mark.batched("meshes")
def test_meshes(cell: Cell, batches: Batches) -> None:
    batches.check(cell)
