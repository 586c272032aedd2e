"""A cluster on Python 3.11 with jax 0.10.2 and one on Python 3.12 with jax 0.12.0.1 make one world.

``HETCCL_TEST_PYTHONS=/path/to/one/python:/path/to/other/python`` names the interpreters; each must have jax_hetccl.
"""

from __future__ import annotations

import pytest

from harness.asserted import run_asserted
from harness.case import Case, module
from harness.judge import check
from harness.layout import Layout
from harness.pool import Pool, Run
from harness.pythons import other_pythons

_PYTHONS = other_pythons()
pytestmark = pytest.mark.skipif(len(_PYTHONS) != 2, reason="HETCCL_TEST_PYTHONS does not name two interpreters")

_MODULES = ("ops", "dtypes", "sizes", "autodiff", "transforms", "order")
_CASES = [c for c in module(*_MODULES) if c.tags & {"smoke", "order"} and not c.tags & {"soak", "wide"}]
_CASES += [c for c in module("dtypes", "sizes") if "wire" in c.tags and c not in _CASES]


def _run(pool: Pool, pythons: tuple[str, ...], transport: str, case: Case, modes: tuple[bool, ...]) -> None:
    world = pool.world(Layout.parse("2/1"), transport, pythons=pythons)
    assert len({h["jax"] for h in world.hello}) == 2, "the two interpreters have the same jax"
    for vma in modes:
        check(pool, world, Run(case, vma), compiler_differs=True)


@pytest.mark.parametrize("case", _CASES, ids=lambda c: c.name)
def test_tcp(case: Case, pool: Pool, soak: bool) -> None:
    _run(pool, _PYTHONS, "tcp", case, case.vma if soak else case.vma[:1])


@pytest.mark.parametrize("case", [c for c in _CASES if "smoke" in c.tags], ids=lambda c: c.name)
def test_shm_other_way_round(case: Case, pool: Pool, soak: bool) -> None:
    _run(pool, _PYTHONS[::-1], "shm", case, case.vma if soak else case.vma[-1:])


@pytest.mark.parametrize("case", [c for c in module("p2p") if "p2p" in c.tags], ids=lambda c: c.name)
def test_p2p(case: Case, pool: Pool) -> None:
    run_asserted(pool, "2/1", "tcp", case, case.vma[0], _PYTHONS)
