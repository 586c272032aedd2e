"""One first error for the whole world.

Every process may notice a failure in its own way: a closed socket, a timeout, a mismatch. The thread
"hetccl-failure" tells the others what this process noticed (a *candidate*), gathers theirs for a
moment, and all adopt the same one, so that every device of every cluster raises the same error.

The member with the lowest index that is not itself accused decides; if it stays silent the next one
does. Two deciders at once are possible only if members disagree on who is alive; then clusters may
name different candidates, but every one of them still raises.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jax_hetccl._errors import HetcclError, error_from
from jax_hetccl.rendezvous.control import ControlPlane

_log = logging.getLogger(__name__)

# One death is seen by several members within milliseconds; what comes later is a consequence.
GATHER_S = 0.3
# How long each next member in line waits longer before it decides itself. The engine adopts its own
# candidate 2 s after it noticed (`abort_grace_s`), so two deciders in line still come before that.
NEXT_S = 0.6
_POLL_S = 0.1

# What explains the others comes first: a lost peer causes timeouts, a corrupt stream mismatches.
_PRIORITY = ("peer_lost", "corrupt", "mismatch", "agreement", "timeout", "internal", "aborted")

# How the loss of a peer is described, also by the engine, where nobody was exchanging anything at that moment.
_IDLE = "while no operation was under way"

_CANDIDATE = "failure/candidate"
_DECISION = "failure/decision"


class FailureSource(Protocol):
    """The part of the native engine that failures concern."""

    def wait_failure(self, timeout_s: float) -> Any:
        """Returns the first local failure (`kind`, `message`, `lost_rank`), or None after `timeout_s`."""

    def abort(self, kind: str, message: str) -> None:
        """Adopts the first error: all exchanges fail."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A failure as one member noticed it. `accused` is the member it says is lost, or -1; `busy` says that an operation
    was under way there, which the message then names."""

    kind: str
    message: str
    reporter: int
    accused: int = -1
    busy: bool = True


def pick(candidates: list[Candidate]) -> Candidate:
    """The one that everybody adopts: by kind, then one that names an operation, then by the lowest reporter."""

    def order(candidate: Candidate) -> tuple[int, bool, int]:
        known = candidate.kind in _PRIORITY
        place = _PRIORITY.index(candidate.kind) if known else len(_PRIORITY)
        return place, not candidate.busy, candidate.reporter

    return min(candidates, key=order)


class FailureMonitor:
    """Watches one world for failures. Owns the thread "hetccl-failure"."""

    def __init__(
        self,
        engine: FailureSource | None,
        control: ControlPlane,
        under_way: Callable[[int], str] = lambda member: "",
        owner: Mapping[int, int] | None = None,
    ) -> None:
        """`engine` may be None where there are no channels; the control plane is watched anyway. `under_way` has a line
        about a message that is queued or moving, one with that member if there is one; it must not block. `owner` has
        the member of each rank."""
        self._engine = engine
        self._owner = owner or {}
        self._under_way = under_way
        self._control = control
        self._condition = threading.Condition()
        self._candidates: dict[int, Candidate] = {}
        self._decision: Candidate | None = None
        self._adopted: HetcclError | None = None
        self._line_moved = 0.0  # when the line of those who may decide became shorter
        self._stop = False
        self._looks: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="hetccl-failure", daemon=True)

    def start(self) -> None:
        """Starts to watch."""
        self._control.subscribe(_CANDIDATE, self._on_candidate)
        self._control.subscribe(_DECISION, self._on_decision)
        self._control.on_lost(self._on_lost)
        self._thread.start()

    def watch(self, look: Callable[[], None]) -> None:
        """Has ``look`` called a few times a second on the failure thread, until there is a failure; it reports its own."""
        self._looks.append(look)

    def close(self) -> None:
        """Stops watching: what ends from now on ends because this world does."""
        with self._condition:
            self._stop = True
            self._condition.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2)

    @property
    def error(self) -> HetcclError | None:
        """The world's first error, once adopted."""
        return self._adopted

    def report(self, kind: str, message: str, accused: int = -1) -> None:
        """Reports a failure that this process noticed. Returns at once."""
        me = self._control.me
        busy = bool(self._under_way(accused))
        candidate = Candidate(kind, message, me, accused, busy)
        with self._condition:
            if self._stop or self._adopted or me in self._candidates:
                return
            self._candidates[me] = candidate
            self._condition.notify_all()
        try:
            self._control.publish(_CANDIDATE, [kind, message, accused, busy])
        except HetcclError:  # closing
            pass

    # --- from the control thread: must not block ---------------------------------------------

    def _on_candidate(self, member: int, _key: str, value: Any) -> None:
        kind, message, accused, busy = value
        candidate = Candidate(str(kind), str(message), member, int(accused), bool(busy))
        with self._condition:
            self._candidates.setdefault(member, candidate)
            self._condition.notify_all()

    def _on_decision(self, _member: int, _key: str, value: Any) -> None:
        kind, message, reporter = value
        with self._condition:
            self._decision = self._decision or Candidate(str(kind), str(message), int(reporter))
            self._condition.notify_all()

    def _on_lost(self, member: int, why: str) -> None:
        line = self._under_way(member)
        during = f"during {line}" if line else _IDLE
        self.report("peer_lost", f"{why} {during}: the process died or became unreachable", member)
        with self._condition:  # whoever decides need not wait for this one
            self._line_moved = time.monotonic()
            self._condition.notify_all()

    # --- the failure thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop and not self._noticed():
                failure = self._wait_local()
                if failure is not None:
                    self.report(failure.kind, failure.message, self._owner.get(failure.lost_rank, -1))
                for look in tuple(self._looks):
                    look()
            if self._noticed():
                self._adopt(self._agree())
        except Exception as error:
            _log.exception("the failure thread failed")
            if self._engine:
                self._engine.abort("internal", f"the failure thread failed: {error!r}")

    def _noticed(self) -> bool:
        with self._condition:
            return bool(self._candidates) or self._decision is not None

    def _wait_local(self) -> Any:
        if self._engine:
            return self._engine.wait_failure(_POLL_S)
        with self._condition:
            self._condition.wait(_POLL_S)
        return None

    def _agree(self) -> Candidate:
        start = time.monotonic()
        while True:
            with self._condition:
                if self._decision:
                    return self._decision
                # All move up at the same time, and must not decide at the same time then.
                since = max(start + GATHER_S, self._line_moved)
                wait = since + NEXT_S * self._place_in_line() - time.monotonic()
                if wait > 0 and not self._stop:
                    self._condition.wait(wait)
                    continue
                chosen = self._completed(pick(list(self._candidates.values())))
            try:
                self._control.publish(_DECISION, [chosen.kind, chosen.message, chosen.reporter])
            except HetcclError:  # closing
                pass
            return chosen

    def _completed(self, chosen: Candidate) -> Candidate:
        """The same, with the operation that has begun since, if nothing was under way when the loss was noticed."""
        line = self._under_way(chosen.accused) if _IDLE in chosen.message else ""
        return dataclasses.replace(chosen, message=chosen.message.replace(_IDLE, f"during {line}")) if line else chosen

    def _place_in_line(self) -> int:
        accused = {candidate.accused for candidate in self._candidates.values()}
        ahead = range(self._control.me)
        return sum(1 for m in ahead if m not in accused and self._control.state_of(m) == "present")

    def _adopt(self, chosen: Candidate) -> None:
        reporter = self._control.members[chosen.reporter].name
        message = f"{chosen.message} [first noticed by {reporter}]"
        self._adopted = error_from(chosen.kind, message)
        _log.error("this world has failed: %s", message)
        if self._engine:
            self._engine.abort(chosen.kind, message)
        self._control.interrupt(self._adopted)
