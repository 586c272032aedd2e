"""A branch that only one cluster takes: every collective in it ends in an error that shows both sides, and soon."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from cases.kinds import KINDS
from harness.case import CASES
from harness.ends import all_failed, still_alive
from harness.layout import Layout
from harness.pool import Pool, Run, World

# From the last cluster's call to the last error: the time that a message of another program may wait (2 s), agreement,
# and compiling on a busy machine of two cores. The time-outs of the world are longer.
NOTICE_S = 9.0
_PRIMITIVE = {"pmean": "psum", "pshuffle": "ppermute", "pswapaxes": "all_to_all"}


@pytest.fixture(scope="module")
def processes(pool: Pool) -> Iterator[World]:
    """Processes that join a new world for every test."""
    pool.retire()
    world = World(Layout.parse("2/1"), "shm")
    yield world
    wrong = world.close()
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def world(processes: World) -> Iterator[World]:
    yield processes
    assert all(not r.error and r.raw["threads"] == [] for r in processes.request(15, op="shutdown"))
    assert all(not r.error for r in processes.request(30, op="initialize", initialize={"axes": ["data"]}))


@pytest.mark.parametrize("name", KINDS)
def test_one_sided_branch(world: World, name: str) -> None:
    sides = ("takes", "leaves")
    world.ask([Run(CASES[f"failing.one_sided[{name} {side}]"], vma=False) for side in sides], each_device=True)
    started = time.monotonic()
    replies = world.answers(NOTICE_S + 10)
    assert time.monotonic() - started < NOTICE_S, "the error came late"
    op = name.removesuffix(" tiled")
    all_failed(replies, "MismatchError", "left", "right", _PRIMITIVE.get(op, op), r"psum/data \S*int32")
    still_alive(world)
