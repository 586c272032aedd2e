"""A cluster that cannot lower its program, while the others run theirs and wait for it.

An error in a program that all clusters have is raised by all of them, and the world goes on; one that a single cluster
has (a platform without a lowering rule, a kernel for one vendor) leaves the others waiting. Nobody can tell the two
apart at once. So a process publishes how often its lowering failed, and another one reports a failure when it has waited
for that process since, without any progress, although it had no such error itself, in a program that the other process
has not lowered either: one that it has may come from its caches. The process that failed takes its word back as soon as
it lowers another program with exchanges.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax_hetccl._errors import HetcclError
from jax_hetccl.rendezvous.control import ControlPlane

# A process that has the same error raises it well within this time of the first one, or is not waiting yet.
GRACE_S = 5.0
_KEY = "lowering/failed"


@dataclasses.dataclass(frozen=True)
class Wait:
    """A message under way: the process at its other end (an index), the id of its program, and a line for people."""

    member: int
    program: int
    text: str


@dataclasses.dataclass
class _Word:
    """What a process of another cluster said: its number of errors, the last one, and the programs that it can run; since
    when we wait, and for what."""

    errors: int
    text: str
    programs: frozenset[int]
    waiting: Sequence[Wait] = ()
    since: float = 0.0


class Unready:
    """Tells of own lowering errors, and watches for those of others. Thread-safe; :meth:`look` is called now and then.

    Args:
      control: of the world.
      pending: what is under way.
      report: ``report(kind, message)`` fails the world.
    """

    def __init__(
        self, control: ControlPlane, pending: Callable[[], Sequence[Wait]], report: Callable[[str, str], None]
    ) -> None:
        self._control, self._pending, self._report = control, pending, report
        self._lock = threading.Lock()
        self._errors, self._told = 0, False
        self._programs: set[int] = set()
        self._words: dict[int, _Word] = {}
        control.subscribe(_KEY, self._note)

    def lowered(self, *programs: int) -> None:
        """Programs (ids that are equal in all clusters) can be run here from now on."""
        with self._lock:
            self._programs.update(programs)

    def failed(self, error: Exception) -> None:
        """A program with collectives over a spanning axis was not lowered here."""
        first = str(error).strip().partition("\n")[0]
        with self._lock:
            self._errors, self._told = self._errors + 1, True
            word = [self._errors, f"{type(error).__name__}: {first}", sorted(self._programs)]
        self._publish(word)

    def goes_on(self) -> None:
        """Another program is being lowered: what failed before is no reason to wait in vain any more."""
        with self._lock:
            told, self._told = self._told, False
            word = [self._errors, "", []]
        if told:
            self._publish(word)

    def look(self) -> None:
        """Reports a failure if this process waits in vain."""
        with self._lock:
            words = [(m, w) for m, w in self._words.items() if w.errors > self._errors and w.text]
        if not words:
            return
        pending, now = self._pending(), time.monotonic()
        for member, word in words:
            name = self._control.members[member].name
            waiting = [w for w in pending if w.member == member and w.program not in word.programs]
            if not waiting or waiting != word.waiting:
                word.waiting, word.since = waiting, now
            elif now - word.since >= GRACE_S:
                self._report(
                    "agreement",
                    f"{name} could not lower a program with collectives over a spanning axis, for which this cluster "
                    f"waits in {waiting[0].text.partition(': ')[0]}: {word.text}",
                )

    def _publish(self, value: Any) -> None:
        try:
            self._control.publish(_KEY, value)
        except HetcclError:  # the world is being shut down
            pass

    def _note(self, member: int, _key: str, value: Any) -> None:
        if self._control.members[member].cluster == self._control.members[self._control.me].cluster:
            return
        errors, text, programs = value
        with self._lock:
            self._words[member] = _Word(int(errors), str(text), frozenset(map(int, programs)))
