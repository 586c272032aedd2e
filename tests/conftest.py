"""Fixtures and options of the whole test suite.

``--soak`` runs the long versions: every case in every world and mode, more drawn examples, long repetitions.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import hypothesis
import jax
import pytest

import cases
from harness import compiler
from harness.batches import Batches, batched_cells
from harness.cells import Cell, cells, world_order
from harness.pool import Pool
from harness.pythons import other_pythons

cases.load()
# What this process runs itself is on CPU devices, also on a machine with GPUs; workers have platforms of their own.
jax.config.update("jax_platforms", "cpu")
other_pythons()  # takes its variable out of the environment before any test runs
hypothesis.settings.register_profile("short", max_examples=25, derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("soak", max_examples=400, deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the long versions of the tests")
    parser.addoption(
        "--worlds",
        default="",
        help="of the table of cases run only these worlds: LAYOUT-TRANSPORT[,...], as in test ids",
    )
    parser.addoption(
        "--one-mode",
        action="store_true",
        help="of the table of cases run each in one check_vma mode only, the two modes in turn, and not the one that is run without",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "cases(*modules): run these modules of the table of cases, one test per cell",
    )
    config.addinivalue_line(
        "markers",
        "batched(*modules): the same for cases that return programs, many of which run as one",
    )
    compiler.choose(quick=not config.getoption("--soak"))
    hypothesis.settings.load_profile("soak" if config.getoption("--soak") else "short")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, collect in (("cases", cells), ("batched", batched_cells)):
        marker = metafunc.definition.get_closest_marker(name)
        if marker is not None:
            found = collect(marker.args, metafunc.config.getoption("--soak"), metafunc.config.getoption("--one-mode"))
            if chosen := metafunc.config.getoption("--worlds"):
                found = [c for c in found if f"{c.layout}-{c.transport}" in chosen.split(",")]
            metafunc.parametrize("cell", found, ids=[str(c) for c in found])


# A thousand worlds, two hundred kills: the limit of pyproject.toml is that of the short versions.
_SOAK_LIMIT_S = 4200


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        for item in items:
            item.add_marker(pytest.mark.timeout(_SOAK_LIMIT_S))

    def place(item: pytest.Item) -> tuple[int, ...]:
        """First what needs no world, then world by world, then the tests that start worlds of their own."""
        callspec = getattr(item, "callspec", None)
        cell = callspec.params.get("cell") if callspec else None
        if isinstance(cell, Cell):
            return 1, *world_order(cell)
        return (2,) if "pool" in getattr(item, "fixturenames", ()) else (0,)

    items.sort(key=place)


def pytest_sessionfinish() -> None:
    gc.freeze()  # or pytest goes through all results once more, ten times


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The worlds and the oracle. At the end, everything that did not end in order is an error."""
    made = Pool()
    yield made
    made.close()
    if made.troubles:
        pytest.fail("worlds did not end in order:\n" + "\n".join(made.troubles), pytrace=False)


@pytest.fixture(scope="session")
def batches(pool: Pool) -> Batches:
    """Results of cases that run many at a time."""
    return Batches(pool)


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    return request.config.getoption("--soak")
