"""Waiting for a process that could not lower its program ends soon, and only then."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import pytest
from meeting import Meeting

from jax_hetccl import unready
from jax_hetccl.rendezvous.control import ControlPlane


@dataclasses.dataclass
class Member:
    """A member with what it waits for and what it reported."""

    control: ControlPlane
    waits: list[unready.Wait] = dataclasses.field(default_factory=list)
    reports: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.unready = unready.Unready(
            self.control, lambda: list(self.waits), lambda kind, text: self.reports.append((kind, text))
        )

    def looks(self, seconds: float) -> list[tuple[str, str]]:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.reports:
            self.unready.look()
            time.sleep(0.01)
        return self.reports


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Member]]:
    monkeypatch.setattr(unready, "GRACE_S", 0.3)
    with Meeting() as meeting:
        made = [Member(c) for c in meeting.join("left/0", "left/1", "right/0")]
        yield made


RIGHT = 2  # the index of right/0
PROGRAM = 2**64 - 5
TEXT = "psum/data f32[4]: rank 0 (left/0) has received 0 of 16 bytes from rank 2 (right/0)"
WAITS = unready.Wait(RIGHT, PROGRAM, TEXT)


def test_who_waits_in_vain_reports_it(members: list[Member]) -> None:
    left, _, right = members
    right.unready.lowered(PROGRAM - 1)
    left.waits = [WAITS]
    right.unready.failed(NotImplementedError("no rule for platform x\nmore"))
    ((kind, text),) = left.looks(3)
    assert kind == "agreement"
    assert "right/0" in text and "psum/data f32[4]" in text and "NotImplementedError: no rule for platform x" in text


@pytest.mark.parametrize(
    "what",
    [
        "nothing waits",
        "waits for another",
        "waits for one whose name begins alike",
        "moves",
        "failed too",
        "goes on",
        "same cluster",
        "runs cached programs",
    ],
)
def test_who_does_not_wait_in_vain_is_silent(members: list[Member], what: str) -> None:
    left, sibling, right = members
    left.waits = [] if what == "nothing waits" else [WAITS]
    failing = sibling if what == "same cluster" else right
    if what in ("waits for another", "same cluster"):
        left.waits = [dataclasses.replace(WAITS, member=1)]
    if what == "waits for one whose name begins alike":
        left.waits = [unready.Wait(1, PROGRAM, TEXT.replace("right/0", "right/01"))]
    if what == "runs cached programs":
        failing.unready.lowered(PROGRAM, 7)
    failing.unready.failed(ValueError("groups"))
    if what == "failed too":
        left.unready.failed(ValueError("groups"))
    if what == "goes on":
        failing.unready.goes_on()
    for step in range(8):
        assert not left.looks(0.1)
        if what == "moves":
            left.waits = [dataclasses.replace(WAITS, text=TEXT.replace("received 0", f"received {step + 1}"))]


def test_an_error_that_both_had_does_not_hide_the_next_one(members: list[Member]) -> None:
    left, _, right = members
    for member in (left, right):
        member.unready.failed(ValueError("groups"))
    right.unready.goes_on()
    right.unready.failed(ValueError("another"))
    left.waits = [WAITS]
    ((_, text),) = left.looks(3)
    assert "another" in text
