"""A cluster that cannot lower its program, while the others run theirs and wait for it.

An error in a program that all clusters have is raised by all of them, and the world goes on; one that a single cluster
has (a platform without a lowering rule, a kernel for one vendor) leaves the others waiting. Nobody can tell the two
apart at once. So a process publishes how often its lowering failed, and another one reports a failure when it has waited
for that process since, without any progress, although it had no such error itself. The process that failed takes its
word back as soon as it lowers another program with exchanges.
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


@dataclasses.dataclass
class _Word:
    """What a process of another cluster said: its number of errors and the last one; since when we wait, and for what."""

    errors: int
    text: str
    waiting: Sequence[str] = ()
    since: float = 0.0


class Unready:
    """Tells of own lowering errors, and watches for those of others. Thread-safe; :meth:`look` is called now and then.

    Args:
      control: of the world.
      pending: describes the exchanges under way, a line for each, with the name of the process waited for.
      report: ``report(kind, message)`` fails the world.
    """

    def __init__(
        self, control: ControlPlane, pending: Callable[[], Sequence[str]], report: Callable[[str, str], None]
    ) -> None:
        self._control, self._pending, self._report = control, pending, report
        self._lock = threading.Lock()
        self._errors, self._told = 0, False
        self._words: dict[int, _Word] = {}
        control.subscribe(_KEY, self._note)

    def failed(self, error: Exception) -> None:
        """A program with collectives over a spanning axis was not lowered here."""
        first = str(error).strip().partition("\n")[0]
        with self._lock:
            self._errors, self._told = self._errors + 1, True
        self._publish([self._errors, f"{type(error).__name__}: {first}"])

    def goes_on(self) -> None:
        """Another program is being lowered: what failed before is no reason to wait in vain any more."""
        with self._lock:
            told, self._told = self._told, False
        if told:
            self._publish([self._errors, ""])

    def look(self) -> None:
        """Reports a failure if this process waits in vain."""
        with self._lock:
            words = [(m, w) for m, w in self._words.items() if w.errors > self._errors and w.text]
        if not words:
            return
        lines, now = self._pending(), time.monotonic()
        for member, word in words:
            name = self._control.members[member].name
            waiting = [line for line in lines if name in line]
            if not waiting or waiting != word.waiting:
                word.waiting, word.since = waiting, now
            elif now - word.since >= GRACE_S:
                self._report(
                    "agreement",
                    f"{name} could not lower a program with collectives over a spanning axis, for which this cluster "
                    f"waits in {waiting[0].partition(':')[0]}: {word.text}",
                )

    def _publish(self, value: Any) -> None:
        try:
            self._control.publish(_KEY, value)
        except HetcclError:  # the world is being shut down
            pass

    def _note(self, member: int, _key: str, value: Any) -> None:
        if self._control.members[member].cluster == self._control.members[self._control.me].cluster:
            return
        errors, text = value
        with self._lock:
            self._words[member] = _Word(int(errors), str(text))
