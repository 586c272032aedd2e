"""The coordinator: where members meet. Needed only to join; it may die and come back at any time.

One thread owns everything. Each member has a *seat*, taken by a JOIN and kept by repeating it while
waiting and by ALIVE messages while the world runs. When all seats are waiting and fresh, the world is
formed: everyone gets a WELCOME with a new nonce and all records. Members of a running world learn who
waits, and may wait in turn together with some of these (`record["with"]`, a list of clusters) while
their world goes on (`record["replaces"]`, their instance in it). Nothing is stored: members repeat
what a restarted coordinator must know.

Messages (client to coordinator):   JOIN protocol, instance, record | ALIVE instance, epoch, holder | LEAVE instance
Messages (coordinator to client):   WAIT missing | WELCOME nonce, directory | REFUSED why | SEEKERS names
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import logging
import os
import threading
import time
from typing import Any

import zmq

from jax_hetccl._config import Config
from jax_hetccl._errors import RendezvousError
from jax_hetccl.rendezvous import addresses, keys, messages, sockets, zap
from jax_hetccl.rendezvous.doorkeeper import Doorkeeper

_log = logging.getLogger(__name__)

# A joiner repeats itself every JOIN_BEAT, a running member every ALIVE_BEAT. Whoever has been silent
# for HOLD is gone: its seat no longer counts and may be taken by a restarted process.
JOIN_BEAT = 0.5
ALIVE_BEAT = 1.0
HOLD = 4.0
_POLL_MS = 200
_MOST_CHALLENGERS = 1024


def world_identity(config: Config) -> str:
    """What all members must agree on to meet: the list of clusters."""
    return ",".join(f"{name}:{count}" for name, count in config.clusters)


def epoch_of(nonce: bytes) -> int:
    """The 64-bit identity of the world with this nonce; never 0."""
    return int.from_bytes(hashlib.sha256(b"hetccl epoch" + nonce).digest()[:8], "big") | 1


@dataclasses.dataclass
class _Seat:
    """Who holds a member's name. `epoch` is 0 while waiting for a world."""

    instance: bytes
    holder: str
    heard: float
    route: bytes = b""
    record: dict[str, Any] | None = None
    epoch: int = 0


@dataclasses.dataclass
class _World:
    epoch: int
    welcome: bytes
    instances: dict[str, bytes]


class Coordinator:
    """Serves joins for one job. `start`, then `stop`; both from the owner's thread.

    Constructing it raises `zmq.ZMQError` if it cannot listen; see `try_host` and `serve`.
    """

    def __init__(self, config: Config, bind_address: str | None = None) -> None:
        """Binds to the coordinator's address, or to `bind_address` with the coordinator's port."""
        self._names = config.member_names
        self._context = zmq.Context()
        identity = world_identity(config)
        admitted = {keys.curve_pair(config.secret, identity, name)[0]: name for name in self._names}
        self._gate = zap.Gate(self._context, admitted)
        self._router = sockets.server(self._context, keys.curve_pair(config.secret, "", keys.COORDINATOR))
        self._doorkeeper = Doorkeeper(self._router, len(self._names))
        host = bind_address or _bind_address(config)
        try:
            self._router.bind(addresses.endpoint(host, config.coordinator[1]))
        except zmq.ZMQError:
            self._close_sockets()
            raise
        self._seats: dict[str, _Seat] = {}
        self._challengers: dict[tuple[str, bytes], float] = {}
        self._gone: dict[str, tuple[float, str]] = {}
        self._world: _World | None = None
        self._stop = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="hetccl-coordinator", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread and releases the port; idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            os.eventfd_write(self._wake, 1)
            self._thread.join(5)
            os.close(self._wake)

    def wait(self) -> None:
        """Serves until the thread ends or the caller is interrupted."""
        while self._thread.is_alive():
            self._thread.join(1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._gate.socket, zmq.POLLIN)
        poller.register(self._doorkeeper.monitor, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._stop.is_set():
                ready = dict(poller.poll(_POLL_MS))
                self._doorkeeper.handle()
                if self._gate.socket in ready:
                    self._gate.handle()
                if self._router in ready:
                    self._receive()
        except Exception:
            _log.exception("the coordinator's thread failed; joining is not possible until it is restarted")
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._doorkeeper.close()
        self._router.close(0)
        self._gate.close()
        self._context.term()

    def _receive(self) -> None:
        for _ in range(256):  # a bound, so that admission is served between batches
            try:
                route, frame = self._router.recv_multipart(zmq.NOBLOCK, copy=False)[:2]
            except zmq.Again:
                return
            except ValueError:  # one frame only: not ours
                continue
            self._doorkeeper.vouch(frame)
            self._take(str(frame.get("User-Id")), route.bytes, frame.buffer)

    def _take(self, name: str, route: bytes, data: memoryview | bytes) -> None:
        """Acts on what the member with this name sent, whatever it is."""
        fields = messages.unpack(data)
        if fields is None or name not in self._names:
            return
        try:
            self._dispatch(name, route, fields)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
            self._reply(route, "REFUSED", f"{name} sent a malformed {fields[0]:.20} ({error})")

    def _dispatch(self, name: str, route: bytes, fields: list[Any]) -> None:
        kind, *rest = fields
        if kind == "JOIN":
            protocol, instance, record = rest
            if protocol != messages.PROTOCOL:
                why = (
                    f"{name} speaks protocol {protocol}, the coordinator speaks {messages.PROTOCOL}:"
                    " install the same version of jax_hetccl everywhere"
                )
                self._gone[name] = (time.monotonic(), "refused: " + why)
                self._reply(route, "REFUSED", why)
                return
            self._join(name, route, _instance(instance), dict(record))
        elif kind == "ALIVE":
            instance, epoch, holder = rest
            self._alive(name, _instance(instance), int(epoch), str(holder))
            self._reply(route, "SEEKERS", [n for n in self._names if self._waits(n, time.monotonic())])
        elif kind == "LEAVE":
            seat = self._seats.get(name)
            if seat and seat.instance == rest[0]:
                del self._seats[name]
                self._gone[name] = (time.monotonic(), "left" if seat.epoch else "gave up waiting")

    def _join(self, name: str, route: bytes, instance: bytes, record: dict[str, Any]) -> None:
        now = time.monotonic()
        seat = self._seats.get(name)
        if seat and record.get("replaces") == seat.instance:  # it holds the seat itself, in a world that it will leave
            seat = None
        if seat and seat.instance != instance and now - seat.heard < HOLD:
            # Two claims to one name. If the holder speaks again it lives and the newcomer is the
            # mistake; if it stays silent it is dead and the newcomer is its restart.
            if len(self._challengers) >= _MOST_CHALLENGERS:  # the oldest repeats itself, if it is still there
                del self._challengers[next(iter(self._challengers))]
            first = self._challengers.setdefault((name, instance), now)
            if seat.heard > first:
                self._reply(
                    route,
                    "REFUSED",
                    f"{name} is held by {seat.holder}, which is alive; give every process its own "
                    "HETCCL_CLUSTER and HETCCL_PROCESS, and every job on this machine its own coordinator port",
                )
            else:
                self._reply(route, "WAIT", [f"{name} (checking whether {seat.holder} still holds the name)"])
            return
        if seat is None or seat.instance != instance:
            seat = self._seats[name] = _Seat(instance, str(record.get("holder", "?")), now)
            self._challengers = {k: t for k, t in self._challengers.items() if k[0] != name}
            self._gone.pop(name, None)
        seat.heard, seat.route, seat.record = now, route, record
        world = self._world
        if seat.epoch and world and world.instances.get(name) == instance:
            self._router_send(route, world.welcome)  # the first one was lost with a connection
            return
        seat.epoch = 0
        names = self._wanted(record)
        missing = self._missing(now, names)
        if missing:
            self._reply(route, "WAIT", missing)
        else:
            self._form(names)

    def _alive(self, name: str, instance: bytes, epoch: int, holder: str) -> None:
        seat = self._seats.get(name)
        if seat is None:  # we were restarted; the member's world goes on without us
            seat = self._seats[name] = _Seat(instance, holder, 0.0, epoch=epoch)
        if seat.instance == instance:
            seat.heard = time.monotonic()

    def _wanted(self, record: dict[str, Any]) -> list[str]:
        """The members that this one wants to be in a world with."""
        clusters = record.get("with")
        return [n for n in self._names if clusters is None or n.rpartition("/")[0] in clusters]

    def _waits(self, name: str, now: float) -> bool:
        seat = self._seats.get(name)
        return seat is not None and not seat.epoch and now - seat.heard < HOLD

    def _missing(self, now: float, names: list[str]) -> list[str]:
        missing = []
        for name in names:
            seat = self._seats.get(name)
            if seat is None:
                when, what = self._gone.get(name, (0.0, ""))
                missing.append(f"{name} ({what} {now - when:.0f} s ago)" if what else f"{name} (never seen)")
            elif now - seat.heard >= HOLD:
                missing.append(f"{name} ({seat.holder} silent for {now - seat.heard:.0f} s)")
            elif seat.epoch:
                missing.append(f"{name} ({seat.holder} is in a world that is still running)")
            elif (seat.record or {}).get("with") and self._wanted(seat.record or {}) != names:
                missing.append(f"{name} ({seat.holder} joins with {', '.join((seat.record or {})['with'])})")
        if missing and self._gate.refused:
            peers = ", ".join(sorted(self._gate.refused)[:8])
            missing.append(
                f"[connections with a key of none of these members came from {peers}: the secret is the same"
                " but HETCCL_CLUSTERS or the member's place differs]"
            )
        return missing

    def _form(self, names: list[str]) -> None:
        nonce = os.urandom(32)
        epoch = epoch_of(nonce)
        directory = [[name, self._seats[name].record] for name in names]
        welcome = messages.pack("WELCOME", nonce, directory)
        self._world = _World(epoch, welcome, {n: self._seats[n].instance for n in names})
        self._gate.refused.clear()
        for name in names:
            self._seats[name].epoch = epoch
            self._router_send(self._seats[name].route, welcome)

    def _reply(self, route: bytes, *fields: Any) -> None:
        self._router_send(route, messages.pack(*fields))

    def _router_send(self, route: bytes, data: bytes) -> None:
        try:  # a ROUTER drops what it cannot route; the client repeats its request
            self._router.send_multipart([route, data], zmq.NOBLOCK)
        except zmq.ZMQError:
            pass


def _instance(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) != 16:
        raise ValueError("an instance has 16 bytes")
    return value


def _bind_address(config: Config) -> str:
    if config.loopback:
        return addresses.resolve_host(*config.coordinator)[1]
    _, address = addresses.resolve_host(*config.coordinator)
    # A host name that means loopback here (127.0.1.1 in /etc/hosts) means us, on our real address.
    return addresses.local_address(config) if address.startswith("127.") else address


def try_host(config: Config) -> Coordinator | None:
    """Starts the coordinator here if this process should host it.

    The rule: the first process of the first cluster hosts it, unless HETCCL_COORDINATOR_EXTERNAL=1,
    or something listens there already, or the coordinator's address is not this machine's.
    """
    return None if config.cluster or config.process else host(config)


def host(config: Config) -> Coordinator | None:
    """Starts the coordinator of the job here, unless HETCCL_COORDINATOR_EXTERNAL=1, or something listens there already, or
    the coordinator's address is not this machine's."""
    if config.coordinator_external:
        return None
    try:
        coordinator = Coordinator(config)
    except zmq.ZMQError as error:
        if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENODEV):
            _log.info("coordinator %s: not hosted here (%s)", config.coordinator_text, error)
            return None
        raise RendezvousError(f"cannot host the coordinator on {config.coordinator_text}: {error}") from None
    coordinator.start()
    return coordinator


def serve(config: Config, bind_address: str | None = None) -> Coordinator:
    """Starts a stand-alone coordinator; call `.wait()` on the result, then `.stop()`.

    Args:
      config: from `resolve(member=False)`; only coordinator, clusters and secret matter.
      bind_address: the local address to listen on, if it is not the coordinator's own.

    Raises:
      RendezvousError: the address is in use or is not this machine's.
    """
    try:
        coordinator = Coordinator(config, bind_address)
    except zmq.ZMQError as error:
        raise RendezvousError(
            f"cannot listen on {bind_address or config.coordinator[0]} port {config.coordinator[1]}: {error};"
            " is another coordinator running there, or is the address another machine's?"
        ) from None
    coordinator.start()
    return coordinator
