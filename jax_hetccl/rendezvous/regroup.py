"""Forming a smaller world out of a failed one, over the control plane that still connects its survivors.

Each process says whom it takes for gone and takes over what the others say (`survivors`). Once those left say the same,
the first of them decides: it makes the new world's nonce and tells whose words it heard, which bring the public keys made
for that world alone. Everybody then connects with everybody. Who has heard from all says so, and the world stands when all
that live have said so; if somebody dies before, the others begin again over the old control plane, which they have kept.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_hetccl._config import Config
from jax_hetccl._errors import AgreementError, HetcclError, PeerLostError, RendezvousError
from jax_hetccl.rendezvous import survivors
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.door import Door, coordinator_endpoint, to_coordinator
from jax_hetccl.rendezvous.join import check_agreement
from jax_hetccl.rendezvous.member import Joined, Member, members_of
from jax_hetccl.rendezvous.survivors import Word

_WORD, _DECISION, _END = "regroup/word", "regroup/decision", "regroup/end"
_HELLO, _REACHED = "join/hello", "join/reached"
# Said in the old world by who leaves it for a new one: the names of the new one's members.
AHEAD = "regroup/ahead"
# How often a waiting process looks who has died.
_LOOK_S = 0.05
# Beyond the time that a silent cluster has: to agree, to connect, and to begin again if somebody dies meanwhile.
_FORM_S = 20.0


class _ClusterLostError(PeerLostError):
    """This cluster cannot go on; the others can."""


@dataclasses.dataclass(frozen=True)
class _Decision:
    """What the first living process decided: the nonce, and name and public key of every member of the new world."""

    sender: int
    nonce: bytes
    keys: Mapping[str, bytes]


def regroup(
    old: ControlPlane,
    job: Config,
    record: dict[str, Any] | None = None,
    *,
    clusters: Sequence[str] | None = None,
    at_least: int = 1,
    timeout: float = 600.0,
) -> ControlPlane:
    """Forms a world of the clusters of `old` that are left. Bounded; `old` stays as it is, also after an error.

    Args:
      old: this process's member of the world that failed, or that some of its clusters leave.
      job: the settings that this process was started with.
      record: facts about this process for the others, as for `join`.
      clusters: the names of those to go on with, equal in all of them; None: whoever is left.
      at_least: with fewer clusters than this nobody goes on.
      timeout: seconds after which a cluster that has not come is gone too (or missing, if it was named).

    Returns:
      The new world's control plane, connected with every member that lives. It inherits nothing from `old` yet.

    Raises:
      RendezvousError: the others go on without this cluster; too few are left; a named cluster does not come.
      AgreementError: the processes name different clusters, or disagree about a fact in `record["agree"]`.
      PeerLostError: a process of this cluster, or of a cluster that was named, is lost.
    """
    return _Regroup(old, job, record or {}, clusters, at_least, timeout).run()


class _Regroup:
    """One attempt of one process. `run` is called once; control threads only wake it up."""

    def __init__(
        self,
        old: ControlPlane,
        job: Config,
        record: dict[str, Any],
        clusters: Sequence[str] | None,
        at_least: int,
        timeout: float,
    ) -> None:
        self._old, self._job, self._record = old, job, record
        self._me = old.members[old.me]
        self._asked = None if clusters is None else tuple(clusters)
        self._at_least, self._timeout = at_least, timeout
        self._started = time.monotonic()
        self._gone = frozenset(
            m.cluster for m in old.members if clusters is not None and m.cluster_name not in clusters
        )
        self._condition = threading.Condition()
        # A clock: words of attempts that have ended, under way still maybe, count no more.
        self._attempt = 1 + max((int(attempt) for attempt, _ in self._latest(_END).values()), default=0)
        self._tried: _Decision | None = None  # the last one that this process followed
        self._heard = 0  # counts what has come in, for those who wait for more

    def run(self) -> ControlPlane:
        self._old.subscribe("regroup/", lambda *_: self._notice())
        try:
            while (control := self._try()) is None:
                pass
            return control
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Tells those who wait for this process; they would take it for silent."""
        try:
            if isinstance(error, _ClusterLostError):
                self._old.publish(_WORD, Word(self._gone | {self._me.cluster}, self._asked, {}, self._attempt).packed())
            else:
                self._old.publish(_END, [self._attempt, str(error) or type(error).__name__])
        except HetcclError:  # it was closed under us
            pass

    def _latest(self, key: str) -> dict[int, Any]:
        """What the members said last, by index; in each one's order, which handlers that come late do not see."""
        said = ((m.index, self._old.published(key, m.index)) for m in self._old.members)
        return {index: values[key] for index, values in said if key in values}

    def _words(self) -> dict[int, Word]:
        """The others' words in this attempt, or a later one, which then is ours too."""
        words = {m: Word.unpacked(v) for m, v in self._latest(_WORD).items() if m != self._me.index}
        self._attempt = max([self._attempt, *(w.attempt for w in words.values())])
        return {m: w for m, w in words.items() if w.attempt == self._attempt}

    def _decisions(self) -> dict[int, _Decision]:
        """The decisions of attempts that their senders have not given up."""
        ends = {m: int(attempt) for m, (attempt, _) in self._latest(_END).items()}
        return {
            m: _Decision(m, bytes(nonce), {str(name): bytes(key) for name, key in named})
            for m, (nonce, named, attempt) in self._latest(_DECISION).items()
            if attempt > ends.get(m, 0) and m != self._me.index
        }

    def _ends(self) -> dict[int, str]:
        """Why members gave up this attempt, or a later one."""
        return {m: str(text) for m, (attempt, text) in self._latest(_END).items() if attempt >= self._attempt}

    def _notice(self) -> None:
        with self._condition:
            self._heard += 1
            self._condition.notify_all()

    def _wait(self, heard: int) -> None:
        """Until there is more than that, or time for another look."""
        with self._condition:
            if self._heard == heard:
                self._condition.wait(_LOOK_S)

    # --- one attempt ---------------------------------------------------------------------------

    def _try(self) -> ControlPlane | None:
        """One world that is agreed on and tried; None if somebody died before it stood."""
        door = Door(self._job, self._record)
        try:
            decision, directory = self._agreed(door)
            members = members_of(self._job, directory)
            me = next(m.index for m in members if m.name == self._me.name)
            client = to_coordinator(door.context, self._job)
            client.connect(coordinator_endpoint(self._job))
            control = ControlPlane(
                Joined(
                    door.context, door.router, door.gate, door.doorkeeper, door.keys, decision.nonce, members, me,
                    client, self._old.instance, door.holder, None,
                )
            )  # fmt: skip
        except BaseException:
            door.close()
            raise
        try:
            if self._stands(control, decision):
                check_agreement(control)
                return control
        except BaseException:
            control.abandon()
            raise
        control.abandon()
        return None

    def _agreed(self, door: Door) -> tuple[_Decision, list[tuple[str, Mapping[str, Any]]]]:
        """Says who is gone until those left say the same and one has decided; the decision, and everybody's record as it
        said it itself."""
        members, said = self._old.members, None
        while True:
            with self._condition:
                heard = self._heard
            words, decisions, ends = self._words(), self._decisions(), self._ends()
            self._gone = self._now_gone(words)
            self._refuse(words, decisions.values(), ends)
            word = Word(self._gone, self._asked, door.record, self._attempt)
            if word != said:
                self._old.publish(_WORD, word.packed())
                said = word
            words[self._me.index] = word
            left = survivors.living(self._gone, members)
            directory = [(m.name, words[m.index].record) for m in left if m.index in words]
            keys = {name: record.get("curve", b"") for name, record in directory}
            found = decisions.get(left[0].index)
            if left[0] is self._me and not survivors.undecided(self._gone, words, members):
                found = _Decision(self._me.index, os.urandom(32), keys)
                self._old.publish(_DECISION, [found.nonce, list(map(list, keys.items())), self._attempt])
            # One of an earlier attempt, or before somebody died, names other keys.
            if found is not None and found.keys == keys and len(keys) == len(left):
                self._tried = found
                return found, directory
            self._bounded(words)
            door.doorkeeper.handle()  # strangers may come before the others do
            self._wait(heard)

    def _now_gone(self, words: Mapping[int, Word]) -> frozenset[int]:
        lost = {m.cluster for m in self._old.members if self._old.state_of(m.index) != "present"}
        if self._late() and self._asked is None:
            lost |= {m.cluster for m in self._silent(words)}
        return survivors.merged(self._gone | lost, words, self._old.members)

    def _silent(self, words: Mapping[int, Word]) -> list[Member]:
        left = survivors.living(self._gone, self._old.members)
        return [m for m in left if m.index not in words and m is not self._me]

    def _late(self) -> bool:
        return time.monotonic() - self._started > self._timeout

    def _refuse(self, words: Mapping[int, Word], decisions: Iterable[_Decision], ends: Mapping[int, str]) -> None:
        """Raises what stands in the way of going on."""
        own = [m for m in self._old.members if m.cluster == self._me.cluster]
        away, how = [m.name for m in own if self._old.state_of(m.index) != "present"], "lost"
        if not away and self._asked is None and self._late():
            away, how = [m.name for m in own if m is not self._me and m.index not in words], "hears nothing of"
        if away:
            raise _ClusterLostError(
                f"{self._me.name} cannot go on: its cluster {how} {', '.join(away)}, and a cluster goes on as a whole. End its "
                "processes and start them again; initialize() brings the cluster back into the job"
            )
        with_us = self._tried.keys if self._tried is not None else ()
        departed = [m for m in self._old.members if self._old.state_of(m.index) == "departed" and m.index not in ends]
        gone_on = self._latest(AHEAD)  # said before the goodbye
        ahead = [m.name for m in departed if m.name in with_us or self._me.name in gone_on.get(m.index, ())]
        without_us = next((list(d.keys) for d in decisions if self._me.name not in d.keys), [])
        if ahead or without_us or self._me.cluster in self._gone:
            who = ", ".join(ahead or without_us or ("the other clusters",))
            raise RendezvousError(
                f"{self._me.name}: {who} go on without this cluster, which they took for lost (or did not name). Call "
                "hetccl.shutdown() and hetccl.initialize(), or start the processes again, to come back into the job"
            )
        heard = {i: word for i, word in words.items() if self._old.members[i].cluster not in self._gone}
        said = {**heard, self._me.index: Word(self._gone, self._asked)}
        if (difference := survivors.differing(said, self._old.members)) is not None:
            raise AgreementError(f"reinitialize: {difference}; name the same clusters in every process")
        named = [m for m in self._old.members if self._asked and m.cluster_name in self._asked]
        if away := sorted({m.name for m in named if m.cluster in self._gone}):
            raise PeerLostError(
                f"reinitialize(clusters={','.join(self._asked or ())!r}): {', '.join(away)} is gone; leave it out"
            )
        for m in survivors.living(self._gone, self._old.members):
            if m.index in ends:
                raise RendezvousError(f"reinitialize: {m.name} gave up: {ends[m.index]}")
        left = sorted({m.cluster_name for m in survivors.living(self._gone, self._old.members)})
        if len(left) < self._at_least:
            raise RendezvousError(
                f"reinitialize: only {', '.join(left)} can go on, fewer clusters than at_least={self._at_least}; the job "
                "ends here, or goes on elsewhere if the network has split"
            )

    def _bounded(self, words: Mapping[int, Word]) -> None:
        waited = time.monotonic() - self._started
        silent = ", ".join(m.name for m in self._silent(words))
        if waited > self._timeout and self._asked is not None and silent:
            raise RendezvousError(
                f"reinitialize(clusters={','.join(self._asked)!r}): waited {waited:.0f} s for {silent} to call it too; is it "
                "still running, and does it notice the failure?"
            )
        if waited > self._timeout + _FORM_S:
            raise RendezvousError(
                f"reinitialize: {self._me.name} waited {waited:.0f} s for the others to agree"
                + (f"; {silent} did not come" if silent else "")
            )

    # --- whether the new world stands ------------------------------------------------------------

    def _stands(self, control: ControlPlane, decision: _Decision) -> bool:
        """Connects with everybody. False if somebody died first, or begins again because somebody did."""
        came: dict[str, set[int]] = {_HELLO: set(), _REACHED: set()}

        def note(member: int, key: str, _value: Any) -> None:
            with self._condition:
                came[key].add(member)
            self._notice()

        for key in came:
            control.subscribe(key, note)
        places = {m.name: m for m in self._old.members}
        others = {m.index: places[m.name] for m in control.members if m.index != control.me}
        control.publish(_HELLO, None)
        reached = False
        end = time.monotonic() + _FORM_S
        while True:
            with self._condition:
                hello, done = set(came[_HELLO]), set(came[_REACHED])
                heard = self._heard
            words, ends = self._words(), self._ends()
            if not reached and hello >= others.keys():
                reached = True
                control.publish(_REACHED, None)
            if reached and all(control.state_of(m) == "lost" for m in others.keys() - done):
                return True
            for index, there in others.items():
                if index in done:
                    continue
                if there.index in ends:
                    raise RendezvousError(f"reinitialize: {there.name} gave up: {ends[there.index]}")
                again = words.get(there.index)
                if again is not None and again.record.get("curve") != decision.keys[there.name]:
                    return False
                if not reached and "lost" in (self._old.state_of(there.index), control.state_of(index)):
                    return False
            if time.monotonic() > end:
                late = [f"{there.name} at {there.record['control']}" for i, there in others.items() if i not in done]
                raise RendezvousError(
                    f"reinitialize: agreed with {', '.join(late)} to go on, but cannot connect; check firewalls, "
                    "HETCCL_PORT_RANGE and HETCCL_SOCKET_IFNAME"
                )
            self._wait(heard)
