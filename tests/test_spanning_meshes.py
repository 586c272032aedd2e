"""Meshes with further axes, axis types and partly manual regions."""

import pytest

from harness.cells import Cell
from harness.pool import Pool


@pytest.mark.cases("meshes")
def test_meshes(cell: Cell, pool: Pool) -> None:
    cell.check(pool)
