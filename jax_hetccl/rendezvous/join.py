"""Joining a world: meet at the coordinator, learn who is there, reach everybody once."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from jax_hetccl._config import Config
from jax_hetccl._errors import AgreementError, HetcclError, RendezvousError
from jax_hetccl.rendezvous import addresses, coordinator, keys, messages, sockets, zap
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.doorkeeper import Doorkeeper
from jax_hetccl.rendezvous.member import Joined, Member

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


def join(config: Config, record: dict[str, Any] | None = None) -> ControlPlane:
    """Joins the world that `config` describes; hosts the coordinator if that is this process's part.

    Args:
      config: this process's settings.
      record: facts about this process for the others; msgpack-able. `record["agree"]` holds those that
        must be the same everywhere, by the name of the setting.

    Returns:
      The control plane, connected with every member.

    Raises:
      RendezvousError: not all members met within `config.join_timeout`; says who is missing and why.
      AgreementError: members disagree about a fact in `record["agree"]`; raised by all of them.
    """
    deadline = time.monotonic() + config.join_timeout
    hosted = coordinator.try_host(config)
    try:
        control = _meet(config, record or {}, deadline, hosted)
    except BaseException:
        if hosted:
            hosted.stop()
        raise
    try:
        _reach_everybody(control, deadline)
        _check_agreement(control)
    except BaseException:
        control.close(1.0)
        raise
    return control


def _meet(
    config: Config, record: dict[str, Any], deadline: float, hosted: coordinator.Coordinator | None
) -> ControlPlane:
    context = zmq.Context()
    fresh = zmq.curve_keypair()
    gate = zap.Gate(context)
    router = sockets.server(context, fresh)
    doorkeeper = Doorkeeper(router, len(config.member_names))
    joiner: _Joiner | None = None
    try:
        address = addresses.local_address(config)
        port = sockets.bind_free(router, address, config.port_range)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        full = {**record, "curve": fresh[0], "control": addresses.endpoint(address, port), "holder": holder}
        joiner = _Joiner(context, config, full, doorkeeper)
        nonce, directory = joiner.wait_for_welcome(deadline)
        members = _members(config, directory)
        me = config.member_names.index(config.member_name)
        if members[me].record.get("curve") != fresh[0]:
            raise RendezvousError(f"the coordinator's directory has another process as {config.member_name}")
        joined = Joined(
            context,
            router,
            gate,
            doorkeeper,
            fresh,
            nonce,
            members,
            me,
            joiner.release(),
            joiner.instance,
            holder,
            hosted,
        )
        return ControlPlane(joined)
    except BaseException:
        if joiner:
            joiner.close()
        doorkeeper.close()
        router.close(0)
        gate.close()
        context.term()
        raise


def _members(config: Config, directory: list[Any]) -> tuple[Member, ...]:
    records = {name: record for name, record in directory}
    members = []
    for cluster, (name, count) in enumerate(config.clusters):
        for process in range(count):
            member_record = records[f"{name}/{process}"]
            members.append(Member(len(members), cluster, name, process, member_record))
    return tuple(members)


class _Joiner:
    """Talks with the coordinator until it says WELCOME. Used by one thread; owns its socket."""

    def __init__(self, context: zmq.Context, config: Config, record: dict[str, Any], doorkeeper: Doorkeeper) -> None:
        self.instance = os.urandom(16)
        self._doorkeeper = doorkeeper  # of the port that this process opens to the others, who come later
        self._config = config
        self._request = messages.pack("JOIN", messages.PROTOCOL, self.instance, record)
        if len(self._request) > messages.PORT_BYTES - 1024:  # the rest is CURVE's
            raise RendezvousError(
                f"what {config.member_name} has to say of itself and its devices takes {len(self._request)} bytes, more "
                f"than the {messages.PORT_BYTES} that a coordinator takes; start one process for fewer devices"
            )
        pair = keys.curve_pair(config.secret, coordinator.world_identity(config), config.member_name)
        server_key = keys.curve_pair(config.secret, "", keys.COORDINATOR)[0]
        self._socket = sockets.client(context, pair, server_key)
        # JOINs that pile up while nobody listens would all arrive at once: keep few.
        self._socket.sndhwm = 2
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._seen: set[int] = set()
        self._missing: list[str] = []
        self._answered = 0.0
        _, address = addresses.resolve_host(*config.coordinator)
        if not config.loopback and address.startswith("127."):
            address = addresses.local_address(config)  # see coordinator._bind_address
        self._socket.connect(addresses.endpoint(address, config.coordinator[1]))

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
        self._doorkeeper.handle()
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


def _check_agreement(control: ControlPlane) -> None:
    first = control.members[0]
    differences = [
        f"{setting} is {value!r} in {first.name} but {member.record.get('agree', {}).get(setting)!r} in {member.name}"
        for setting, value in first.record.get("agree", {}).items()
        for member in control.members
        if member.record.get("agree", {}).get(setting) != value
    ]
    if differences:
        raise AgreementError("settings must be the same everywhere: " + "; ".join(differences))
