"""The control plane: reliable small messages between all members of a world.

Each member binds one ROUTER and connects one DEALER to every other member; all of it belongs to the
thread "hetccl-control". Sender identities come from the CURVE key in use (see `zap`), never from the
message.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from jax_hetccl._errors import HetcclError, PeerLostError, RendezvousError
from jax_hetccl.rendezvous import coordinator as coordinator_
from jax_hetccl.rendezvous import keys, messages, sockets
from jax_hetccl.rendezvous.link import BEAT, LOST_AFTER, Link
from jax_hetccl.rendezvous.member import Joined

_log = logging.getLogger(__name__)

_GOODBYE = "control/goodbye"
_POLL_MS = 200
_SOON_MS = 50  # while it is open whether a broken connection comes back
# How long closing waits for last messages to leave; a coordinator that is gone costs us this much.
_LINGER_MS = 100
# What the coordinator said about others counts for so long; it speaks every ALIVE_BEAT.
_SEEKERS_S = 3.5

Handler = Callable[[int, str, Any], None]


class ControlPlane:
    """Messages between members. Thread-safe; created by `rendezvous.join.join`.

    Attributes:
      epoch: 64-bit identity of this world.
      nonce: the world's nonce, from which keys are bound to this world.
      me: this member's index.
      members: all members, clusters in order, then processes.
      instance: by what the coordinator tells this process from a later one of its name.
    """

    def __init__(self, joined: Joined) -> None:
        """Takes over the sockets and starts the thread."""
        self.nonce = joined.nonce
        self.epoch = coordinator_.epoch_of(joined.nonce)
        self.me = joined.me
        self.members = joined.members
        self.instance = joined.instance
        self._joined = joined
        self._replaced = False
        self._seekers: tuple[float, list[str]] = (0.0, [])
        self._condition = threading.Condition()
        self._values: dict[str, dict[int, Any]] = {}
        self._meetings: dict[str, int] = {}
        self._handlers: list[tuple[str, Handler]] = []
        self._lost_handlers: list[Callable[[int, str], None]] = []
        self._outbox: collections.deque[bytes] = collections.deque()
        self._malformed: set[int] = set()  # members of whose wrong messages the log knows
        self._error: HetcclError | None = None
        self._closing = False
        self._stop = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._links: dict[int, Link] = {}
        for member in self.members:
            if member.index != self.me:
                dealer = sockets.client(joined.context, joined.keys, member.record["curve"])
                dealer.sndhwm = 0
                self._links[member.index] = Link(dealer, member.record["control"])
        joined.gate.admitted = {m.record["curve"]: str(m.index) for m in self.members if m.index != self.me}
        self._thread = threading.Thread(target=self._run, name="hetccl-control", daemon=True)
        self._thread.start()

    # --- used from any thread -----------------------------------------------------------------

    def publish(self, key: str, value: Any) -> None:
        """Sends `value` to all members, this one included: reliably, in order per sender.

        Args:
          key: what it is, such as `"devices"`. Published again, the newer value replaces the older.
          value: anything msgpack can carry; tuples arrive as lists.

        Raises:
          HetcclError: the control plane is closed, or the value is too large.
        """
        payload = messages.pack(key, value)
        if len(payload) > messages.MAX_BYTES:
            raise HetcclError(f"publishing {key!r}: {len(payload)} bytes, more than {messages.MAX_BYTES}")
        with self._condition:
            if self._closing:
                raise HetcclError(f"publishing {key!r}: this world has been shut down")
            self._values.setdefault(key, {})[self.me] = value
            self._outbox.append(payload)
            self._condition.notify_all()
            os.eventfd_write(self._wake, 1)  # under the lock: once `_closing` is set, `close` may close it

    def collect(self, key: str, members: Sequence[int] | None = None, timeout: float = 60.0) -> dict[int, Any]:
        """Waits until each of `members` (default: all) has published `key`.

        Returns:
          Member index to value.

        Raises:
          RendezvousError: not all did within `timeout` seconds; names who is missing.
          PeerLostError: one of the missing died or left.
          HetcclError: whatever `interrupt` was given.
        """
        wanted = range(len(self.members)) if members is None else members
        deadline = time.monotonic() + timeout
        with self._condition:
            while True:
                have = self._values.get(key, {})
                missing = [m for m in wanted if m not in have]
                if not missing:
                    return {m: have[m] for m in wanted}
                if self._error:
                    raise type(self._error)(*self._error.args)  # a new one: tracebacks must not pile up
                self._check_reachable(key, missing)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise RendezvousError(
                        f"waited {timeout:.0f} s for {key!r} from {self._describe(missing)}; is it still running, "
                        "and does it run the same program as this process?"
                    )
                self._condition.wait(remaining)

    def meet(self, key: str, value: Any, timeout: float) -> dict[int, Any]:
        """Gives all members each other's value; the n-th call with a key meets the others' n-th.

        Returns and raises what `collect` does. After a timeout the next call is the same meeting again.
        """
        with self._condition:
            here = f"{key}/{self._meetings.get(key, 0)}"
        self.publish(here, value)
        values = self.collect(here, None, timeout)
        with self._condition:
            self._meetings[key] = self._meetings.get(key, 0) + 1
            del self._values[here]  # everybody came, so nothing more comes
        return values

    def published(self, prefix: str, member: int) -> dict[str, Any]:
        """What `member` has published so far under keys that start with `prefix`."""
        with self._condition:
            return {k: said[member] for k, said in self._values.items() if k.startswith(prefix) and member in said}

    def subscribe(self, prefix: str, handler: Callable[[int, str, Any], None]) -> None:
        """Calls `handler(member, key, value)` for messages of others whose key starts with `prefix`.

        Runs on the control thread and must not block. Values already received are handed over first,
        in the caller's thread.
        """
        with self._condition:
            self._handlers.append((prefix, handler))
            early = [
                (member, key, value)
                for key, values in self._values.items()
                if key.startswith(prefix)
                for member, value in values.items()
                if member != self.me
            ]
        for item in early:
            handler(*item)

    def on_lost(self, handler: Callable[[int, str], None]) -> None:
        """Calls `handler(member, why)` on the control thread when a member dies without a goodbye.

        For members that are lost already it is called at once, in the caller's thread. It must not block.
        """
        with self._condition:
            self._lost_handlers.append(handler)
            early = [index for index, link in self._links.items() if link.lost]
        for index in early:
            handler(index, self._why_lost(index))

    def interrupt(self, error: HetcclError) -> None:
        """Makes every present and future `collect` that would wait raise `error`."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def state_of(self, member: int) -> str:
        """Returns `"present"`, `"departed"` (said goodbye) or `"lost"`."""
        link = self._links.get(member)
        if link is None:
            return "present"
        return "departed" if link.departed else "lost" if link.lost else "present"

    def broken(self, member: int) -> bool:
        """Whether the connection to `member` is down without a goodbye: it died, or soon counts as dead."""
        link = self._links.get(member)
        return link is not None and not link.departed and (link.lost or link.down_for() > 0)

    def gone(self, member: int, notice: float = 0.3) -> bool:
        """Whether `member` has left or is lost. Called when it does not answer: gives the control connection `notice`
        seconds to break too, and then waits until it stands again or counts as lost; a few seconds at most."""
        now = time.monotonic()
        deadline, noticed = now + 2 * LOST_AFTER + notice, now + notice
        with self._condition:
            while self.state_of(member) == "present" and (now := time.monotonic()) < deadline:
                if now >= noticed and not self.broken(member):
                    return False
                self._condition.wait(0.05)
        return self.state_of(member) != "present"

    def ever_connected(self, member: int) -> bool:
        """Whether this process ever reached `member`."""
        return member == self.me or self._links[member].ever_connected

    def pair_key(self, member: int) -> bytes:
        """Returns the 32-byte key that this process and `member` share, for this world only."""
        names = (self.members[self.me].name, self.members[member].name)
        theirs = self.members[member].record["curve"]
        return keys.pair_key(self._joined.keys[1], theirs, self.nonce, names)

    def seekers(self) -> list[str]:
        """The members of the job that wait at the coordinator to join, as it last said; none if that is seconds ago."""
        with self._condition:
            when, names = self._seekers
        return names if time.monotonic() - when < _SEEKERS_S else []

    def inherit(self, predecessor: ControlPlane) -> bool:
        """Takes the predecessor's place at the coordinator, and the coordinator itself if that hosts it; closing the
        predecessor then leaves both alone. Returns whether it has the coordinator now."""
        with predecessor._condition:
            predecessor._replaced = True
            hosted, predecessor._joined.hosted = predecessor._joined.hosted, None
        return self.host(hosted)

    def host(self, hosted: coordinator_.Coordinator | None) -> bool:
        """Takes over a coordinator, to stop it with this object; None: nothing. Returns whether it has one now."""
        with self._condition:
            self._joined.hosted = self._joined.hosted or hosted
            return self._joined.hosted is not None

    def close(self, timeout: float = 3.0) -> None:
        """Says goodbye, waits at most `timeout` seconds until all know, and stops. Idempotent."""
        with self._condition:
            first, self._closing = not self._closing, True
            if first:
                self._outbox.append(messages.pack(_GOODBYE, None))
        if first:
            os.eventfd_write(self._wake, 1)
            deadline = time.monotonic() + timeout
            with self._condition:
                while self._thread.is_alive() and (self._outbox or not self._settled()):
                    if (remaining := deadline - time.monotonic()) <= 0:
                        break
                    self._condition.wait(min(remaining, 0.1))
                self._stop = True
            os.eventfd_write(self._wake, 1)
        self._thread.join(timeout + 2)
        if first and not self._thread.is_alive():
            os.close(self._wake)
            if self._joined.hosted:
                self._joined.hosted.stop()

    def abandon(self) -> None:
        """Closes a world that did not come to stand: whoever waits in it hears nothing more from us. Bounded."""
        with self._condition:
            self._replaced = True  # the place at the coordinator belongs to the world before
        self.close(0.0)

    # --- helpers that need the lock ----------------------------------------------------------

    def _settled(self) -> bool:
        return all(link.settled for link in self._links.values())

    def _check_reachable(self, key: str, missing: Sequence[int]) -> None:
        gone = [m for m in missing if self.state_of(m) != "present"]
        if gone:
            raise PeerLostError(f"waiting for {key!r}: {self._describe(gone)}")

    def _describe(self, indices: Sequence[int]) -> str:
        words = {"present": "", "departed": " (has shut down)", "lost": " (died or became unreachable)"}
        return ", ".join(f"{self.members[m].name}{words[self.state_of(m)]}" for m in indices)

    # --- the control thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            _log.exception("the control thread failed")
            self.interrupt(HetcclError(f"the control thread failed: {error!r}"))
        finally:
            self._tear_down()

    def _loop(self) -> None:
        joined = self._joined
        poller = zmq.Poller()
        for source in (joined.router, joined.gate.socket, joined.doorkeeper.monitor, joined.to_coordinator, self._wake):
            poller.register(source, zmq.POLLIN)
        monitors = {link.monitor: link for link in self._links.values()}
        for monitor in monitors:
            poller.register(monitor, zmq.POLLIN)
        next_beat = next_alive = 0.0
        while not self._stop:
            soon = any(link.down_for() > 0 and not link.lost for link in self._links.values())
            for source, _ in poller.poll(_SOON_MS if soon else _POLL_MS):
                if source is joined.router:
                    joined.doorkeeper.handle()
                    self._receive()
                elif source is joined.doorkeeper.monitor:
                    joined.doorkeeper.handle()
                elif source is joined.gate.socket:
                    joined.gate.handle()
                elif source is joined.to_coordinator:
                    self._heard(messages.unpack(joined.to_coordinator.recv()))
                elif source == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    monitors[source].handle_monitor()
            self._flush()
            self._find_lost()
            if (now := time.monotonic()) >= next_beat:
                next_beat = now + BEAT
                for link in self._links.values():
                    link.beat()
            if now >= next_alive:
                next_alive = now + coordinator_.ALIVE_BEAT
                self._tell_coordinator("ALIVE", joined.instance, self.epoch, joined.holder)

    def _flush(self) -> None:
        sent = False
        while self._outbox:
            payload = self._outbox[0]
            for link in self._links.values():
                link.send(payload)
            self._outbox.popleft()  # only now: close() takes an empty outbox for "handed to links"
            sent = True
        if sent and self._closing:
            with self._condition:
                self._condition.notify_all()

    def _tell_coordinator(self, *fields: Any) -> None:
        try:
            self._joined.to_coordinator.send(messages.pack(*fields), zmq.NOBLOCK)
        except zmq.ZMQError:  # it is gone, which is fine
            pass

    def _heard(self, fields: list[Any] | None) -> None:
        """From the coordinator; anything but this is a late WAIT or WELCOME."""
        if fields and fields[0] == "SEEKERS" and len(fields) == 2 and isinstance(fields[1], list):
            with self._condition:
                self._seekers = (time.monotonic(), [str(name) for name in fields[1]])

    def _receive(self) -> None:
        touched: set[int] = set()
        for _ in range(256):
            try:
                frames = self._joined.router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._joined.doorkeeper.vouch(frames[-1])
            sender = int(str(frames[-1].get("User-Id")))
            if self._take(sender, frames[-1].buffer):
                touched.add(sender)
        for sender in touched:
            self._links[sender].acknowledge()

    def _take(self, sender: int, data: memoryview | bytes) -> bool:
        """Acts on what this member sent, whatever it is; returns whether it has to be acknowledged."""
        fields = messages.unpack(data)
        if fields is None:
            return False
        try:
            return self._act(sender, fields)
        except (TypeError, ValueError, IndexError) as error:
            if sender not in self._malformed:
                self._malformed.add(sender)
                _log.warning("%s sent a malformed %.20s (%s)", self.members[sender].name, fields[0], error)
            return False

    def _act(self, sender: int, fields: list[Any]) -> bool:
        link = self._links[sender]
        link.heard()
        if fields[0] == "ACK":
            link.acknowledged(fields[1])
            if self._closing:
                with self._condition:
                    self._condition.notify_all()
        elif fields[0] == "DATA":
            _, number, piece, last = fields
            payload = link.take(number, piece, last)
            if payload is not None:
                self._deliver(sender, payload)
            return True
        return False

    def _deliver(self, sender: int, payload: bytes) -> None:
        fields = messages.unpack(payload)
        if fields is None or len(fields) != 2:
            return
        key, value = fields  # `unpack` returns only what starts with a text
        with self._condition:
            if key == _GOODBYE:
                self._links[sender].departed = True
            else:
                self._values.setdefault(key, {})[sender] = value
            handlers = [handler for prefix, handler in self._handlers if key.startswith(prefix)]
            self._condition.notify_all()
        for handler in handlers:
            try:
                handler(sender, key, value)
            except Exception:
                _log.exception("handling %r from %s", key, self.members[sender].name)

    def _find_lost(self) -> None:
        for index, link in self._links.items():
            if link.departed or link.lost or not link.overdue:
                continue
            with self._condition:
                link.lost = True
                handlers = [] if self._closing else list(self._lost_handlers)
                self._condition.notify_all()
            for handler in handlers:
                handler(index, self._why_lost(index))

    def _why_lost(self, index: int) -> str:
        return f"{self.members[index].name} closed its control connection without a goodbye"

    def _tear_down(self) -> None:
        joined = self._joined
        if not self._replaced:
            self._tell_coordinator("LEAVE", joined.instance)
        for link in self._links.values():
            link.close(_LINGER_MS)
        joined.to_coordinator.close(_LINGER_MS)
        joined.doorkeeper.close()
        joined.router.close(0)
        joined.gate.close()
        joined.context.term()  # bounded: every socket has a bounded linger
        with self._condition:
            self._condition.notify_all()
