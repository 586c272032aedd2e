"""All members adopt the same first error, whatever each of them noticed."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meeting import Meeting

from jax_hetccl._errors import ExchangeTimeoutError, HetcclError, MismatchError, PeerLostError
from jax_hetccl.failure import GATHER_S, NEXT_S, Candidate, FailureMonitor, pick

ALL = ("left/0", "left/1", "right/0")
OWNER = {0: 0, 1: 0, 2: 1, 3: 2}  # rank: member


@dataclasses.dataclass(frozen=True)
class Noticed:
    """What the engine hands out."""

    kind: str
    message: str
    lost_rank: int = -1


class TwinEngine:
    """A test twin of the engine's failure interface."""

    def __init__(self) -> None:
        self._noticed: Noticed | None = None
        self._event = threading.Event()
        self.adopted: list[tuple[str, str]] = []

    def notice(self, kind: str, message: str, lost_rank: int = -1) -> None:
        self._noticed = Noticed(kind, message, lost_rank)
        self._event.set()

    def wait_failure(self, timeout_s: float) -> Noticed | None:
        self._event.wait(timeout_s)
        return self._noticed

    def abort(self, kind: str, message: str) -> None:
        self.adopted.append((kind, message))


@pytest.fixture
def world():
    with Meeting() as meeting:
        controls = meeting.join(*ALL)
        engines = [TwinEngine() for _ in controls]
        monitors = [FailureMonitor(e, c, owner=OWNER) for e, c in zip(engines, controls, strict=True)]
        for monitor in monitors:
            monitor.start()
        yield meeting, engines, monitors
        for monitor in monitors:
            monitor.close()


def settle(monitors, within: float = 3.0) -> list[HetcclError]:
    deadline = time.monotonic() + within
    while any(m.error is None for m in monitors) and time.monotonic() < deadline:
        time.sleep(0.01)
    errors = [m.error for m in monitors]
    assert None not in errors
    return errors


def test_one_members_notice_is_everybodys_error(world):
    _, engines, monitors = world
    start = time.monotonic()
    engines[2].notice("mismatch", "rank 3 sent f32[4], rank 0 expected f32[8]")
    errors = settle(monitors)
    assert time.monotonic() - start < 1.5
    assert {str(e) for e in errors} == {"rank 3 sent f32[4], rank 0 expected f32[8] [first noticed by right/0]"}
    assert all(type(e) is MismatchError for e in errors)
    assert all(engine.adopted == [("mismatch", str(errors[0]))] for engine in engines)


def test_the_cause_wins_over_its_consequences(world):
    _, engines, monitors = world
    engines[0].notice("timeout", "no progress")
    engines[1].notice("internal", "something")
    engines[2].notice("corrupt", "bad header")
    errors = settle(monitors)
    assert {str(e) for e in errors} == {"bad header [first noticed by right/0]"}
    assert {type(e) for e in errors} == {HetcclError}


def test_equal_kinds_are_decided_by_the_lowest_member(world):
    _, engines, monitors = world
    for index, engine in enumerate(engines):
        engine.notice("timeout", f"seen by {index}")
    assert {str(e) for e in settle(monitors)} == {"seen by 0 [first noticed by left/0]"}


def test_the_first_error_sticks(world):
    _, engines, monitors = world
    engines[1].notice("timeout", "first")
    first = settle(monitors)
    monitors[0].report("peer_lost", "second")
    engines[2].notice("peer_lost", "third")
    time.sleep(0.6)
    assert [m.error for m in monitors] == first
    assert all(len(engine.adopted) == 1 for engine in engines)
    assert type(first[0]) is ExchangeTimeoutError


def test_waiting_for_messages_ends_with_the_error(world):
    meeting, engines, _ = world
    threading.Timer(0.2, engines[2].notice, ["peer_lost", "gone"]).start()
    with pytest.raises(PeerLostError, match="gone"):
        meeting.members["left/0"].collect("mesh", timeout=10)


def test_without_the_first_decider_the_next_one_decides(world):
    """left/0 is alive but mute: its failure thread is gone. The others still agree."""
    _, engines, monitors = world
    monitors[0].close()
    engines[1].notice("timeout", "from left/1")
    engines[2].notice("timeout", "from right/0")
    start = time.monotonic()
    errors = settle(monitors[1:])
    assert time.monotonic() - start < 2
    assert {str(e) for e in errors} == {"from left/1 [first noticed by left/1]"}


def test_one_that_names_an_operation_comes_first(world):
    """A process that was between two operations notices the same loss, but cannot say what it was in."""
    _, engines, monitors = world
    monitors[2]._under_way = lambda member: "psum/data f32[4]: 0 of 16 bytes"
    for index, engine in enumerate(engines):
        engine.notice("peer_lost", f"seen by {index}")
    assert {str(e) for e in settle(monitors)} == {"seen by 2 [first noticed by right/0]"}


def test_a_loss_says_what_was_under_way_when_it_was_decided(world):
    """An operation that begins while the processes agree is the first one that misses the peer."""
    _, engines, monitors = world
    monitors[0]._under_way = lambda member: "psum/data f32[4]: 0 of 16 bytes"
    engines[1].notice("peer_lost", "lost x while no operation was under way: it died")
    text = "lost x during psum/data f32[4]: 0 of 16 bytes: it died [first noticed by left/1]"
    assert {str(e) for e in settle(monitors)} == {text}


def test_the_next_in_line_decides_at_once_if_the_first_is_the_lost_one(world):
    """The engine says who is lost; the others do not wait for its decision."""
    _, engines, monitors = world
    monitors[0].close()
    start = time.monotonic()
    engines[2].notice("peer_lost", "lost left/0 rank 1 at right/0 rank 3 during psum", lost_rank=1)
    errors = settle(monitors[1:])
    assert time.monotonic() - start < GATHER_S + NEXT_S
    assert len({str(e) for e in errors}) == 1 and "lost left/0" in str(errors[0])


def test_a_goodbye_is_no_failure(world):
    meeting, engines, monitors = world
    monitors[2].close()
    meeting.close("right/0")
    time.sleep(1.6)
    assert [m.error for m in monitors] == [None] * 3 and not engines[0].adopted


def test_what_happens_while_shutting_down_is_no_failure(world):
    _, engines, monitors = world
    for monitor in monitors:
        monitor.close()
    engines[0].notice("peer_lost", "its channel closed")
    monitors[1].report("peer_lost", "its channel closed")
    time.sleep(0.5)
    assert [m.error for m in monitors] == [None] * 3


KINDS = st.sampled_from(["peer_lost", "corrupt", "mismatch", "agreement", "timeout", "internal", "news"])


@given(st.lists(st.builds(Candidate, KINDS, st.text(max_size=3), st.integers(0, 9)), min_size=1, max_size=5,
                unique_by=lambda c: c.reporter))  # fmt: skip
def test_the_pick_does_not_depend_on_the_order_of_arrival(candidates):
    assert len({pick(list(order)) for order in itertools.permutations(candidates)}) == 1
