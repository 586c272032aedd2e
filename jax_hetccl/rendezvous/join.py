"""Joining a world: meet at the coordinator, learn who is there, reach everybody once."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from jax_hetccl._config import Config
from jax_hetccl._errors import AgreementError, HetcclError, RendezvousError
from jax_hetccl.rendezvous import coordinator, messages
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.door import Door, coordinator_endpoint, to_coordinator
from jax_hetccl.rendezvous.member import Joined, members_of

_log = logging.getLogger(__name__)

# How often a waiting member says for whom it waits.
_REPORT_EVERY = 10.0

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def join(
    config: Config,
    record: dict[str, Any] | None = None,
    predecessor: ControlPlane | None = None,
    clusters: Sequence[str] | None = None,
) -> ControlPlane:
    """Joins the world that `config` describes; hosts the coordinator if that is this process's part.

    Args:
      config: this process's settings.
      record: facts about this process for the others; msgpack-able. `record["agree"]` holds those that
        must be the same everywhere, by the name of the setting.
      predecessor: this process's member of a world that this one replaces. It stays as it is; see `ControlPlane.inherit`.
      clusters: the names of those to join with; all if left out. Whoever does not say so takes what it gets.

    Returns:
      The control plane, connected with every member. Its members may be of fewer clusters than `config` has.

    Raises:
      RendezvousError: not all members met within `config.join_timeout`; says who is missing and why.
      AgreementError: members disagree about a fact in `record["agree"]`; raised by all of them.
    """
    deadline = time.monotonic() + config.join_timeout
    full = dict(record or {})
    if predecessor is not None:
        full["replaces"] = predecessor.instance
    if clusters is not None:
        full["with"] = list(clusters)
    hosted = coordinator.try_host(config)
    try:
        control = _meet(config, full, deadline, hosted)
    except BaseException:
        if hosted:
            hosted.stop()
        raise
    try:
        _reach_everybody(control, deadline)
        check_agreement(control)
    except BaseException:
        control.close(1.0)
        raise
    return control


def _meet(
    config: Config, record: dict[str, Any], deadline: float, hosted: coordinator.Coordinator | None
) -> ControlPlane:
    door = Door(config, record)
    joiner: _Joiner | None = None
    try:
        joiner = _Joiner(door, config)
        nonce, directory = joiner.wait_for_welcome(deadline)
        members = members_of(config, directory)
        me = next((m for m in members if m.name == config.member_name), None)
        if me is None or me.record.get("curve") != door.keys[0]:
            raise RendezvousError(f"the coordinator's directory has another process as {config.member_name}")
        return ControlPlane(
            Joined(
                door.context,
                door.router,
                door.gate,
                door.doorkeeper,
                door.keys,
                nonce,
                members,
                me.index,
                joiner.release(),
                joiner.instance,
                door.holder,
                hosted,
            )
        )
    except BaseException:
        if joiner:
            joiner.close()
        door.close()
        raise


class _Joiner:
    """Talks with the coordinator until it says WELCOME. Used by one thread; owns its socket."""

    def __init__(self, door: Door, config: Config) -> None:
        self.instance = os.urandom(16)
        self._door = door  # strangers come to it before the others do
        self._config = config
        self._request = messages.pack("JOIN", messages.PROTOCOL, self.instance, door.record)
        if len(self._request) > messages.PORT_BYTES - 1024:  # the rest is CURVE's
            raise RendezvousError(
                f"what {config.member_name} has to say of itself and its devices takes {len(self._request)} bytes, more "
                f"than the {messages.PORT_BYTES} that a coordinator takes; start one process for fewer devices"
            )
        self._socket = to_coordinator(door.context, config)
        # JOINs that pile up while nobody listens would all arrive at once: keep few.
        self._socket.sndhwm = 2
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._seen: set[int] = set()
        self._missing: list[str] = []
        self._answered = 0.0
        self._socket.connect(coordinator_endpoint(config))

    def wait_for_welcome(self, deadline: float) -> tuple[bytes, list[Any]]:
        started = report = time.monotonic()
        while (now := time.monotonic()) < deadline:
            if now - report > _REPORT_EVERY:
                report = now
                _log.warning("%s waits since %.0f s: %s", self._config.member_name, now - started, self._why())
            try:
                self._socket.send(self._request, zmq.NOBLOCK)
            except zmq.Again:
                pass
            until = min(now + coordinator.JOIN_BEAT, deadline)
            while (left := until - time.monotonic()) > 0:
                self._watch()
                if self._socket.poll(int(left * 1000) + 1):
                    welcome = self._take(self._socket.recv())
                    if welcome:
                        return welcome
        self._watch()
        raise RendezvousError(
            f"{self._config.member_name} waited {self._config.join_timeout:.0f} s (HETCCL_JOIN_TIMEOUT) to join "
            f"{coordinator.world_identity(self._config)} at {self._config.coordinator_text}: {self._why()}"
        )

    def _take(self, data: bytes) -> tuple[bytes, list[Any]] | None:
        fields = messages.unpack(data)
        if not fields:
            return None
        if fields[0] == "WELCOME":
            return fields[1], fields[2]
        if fields[0] == "REFUSED":
            raise RendezvousError(f"joining at {self._config.coordinator_text} was refused: {fields[1]}")
        if fields[0] == "WAIT":
            self._missing, self._answered = [str(m) for m in fields[1]], time.monotonic()
        return None

    def _watch(self) -> None:
        self._door.doorkeeper.handle()
        while self._monitor.poll(0):
            self._seen.add(recv_monitor_message(self._monitor)["event"])

    def _why(self) -> str:
        if self._answered:
            ago = time.monotonic() - self._answered
            stale = f" (as of {ago:.0f} s ago; the coordinator has not answered since)" if ago > 3 else ""
            return "missing: " + ", ".join(self._missing) + stale
        if zmq.EVENT_HANDSHAKE_FAILED_AUTH in self._seen:
            return (
                f"the coordinator has the same secret but does not know {self._config.member_name} of "
                f"{coordinator.world_identity(self._config)}; HETCCL_CLUSTERS must be the same everywhere"
            )
        if zmq.EVENT_CONNECTED in self._seen and zmq.EVENT_HANDSHAKE_SUCCEEDED not in self._seen:
            return (
                "something listens there but does not answer our key: HETCCL_SECRET differs, or it is no "
                "hetccl coordinator"
            )
        first = self._config.member_names[0]
        return (
            f"no coordinator there; it is hosted by {first} or by `hetccl coordinator`: is that running, and is "
            "the port open?"
        )

    def release(self) -> zmq.Socket:
        """Hands over the socket to the coordinator."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        return self._socket

    def close(self) -> None:
        """Gives the seat back and closes."""
        try:
            self._socket.send(messages.pack("LEAVE", self.instance), zmq.NOBLOCK)
        except zmq.ZMQError:
            pass
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(300)


def _reach_everybody(control: ControlPlane, deadline: float) -> None:
    """Waits until messages flow between all members, so that later errors are not about joining."""
    control.publish("join/hello", None)
    left = max(deadline - time.monotonic(), 1.0)
    try:
        control.collect("join/hello", timeout=left)
    except HetcclError as error:
        unreachable = [
            f"{m.name} at {m.record['control']}" for m in control.members if not control.ever_connected(m.index)
        ]
        if not unreachable:
            raise RendezvousError(f"all members met, then: {error}") from None
        raise RendezvousError(
            f"met {', '.join(unreachable)} at the coordinator but cannot connect there; check firewalls, "
            "HETCCL_PORT_RANGE and HETCCL_SOCKET_IFNAME"
        ) from None


def check_agreement(control: ControlPlane) -> None:
    """Raises AgreementError if members disagree about a fact in `record["agree"]`."""
    first = control.members[0]
    differences = [
        f"{setting} is {value!r} in {first.name} but {member.record.get('agree', {}).get(setting)!r} in {member.name}"
        for setting, value in first.record.get("agree", {}).items()
        for member in control.members
        if member.record.get("agree", {}).get(setting) != value
    ]
    if differences:
        raise AgreementError("settings must be the same everywhere: " + "; ".join(differences))
