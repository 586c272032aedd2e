"""The world's data channels: opens outgoing ones, takes incoming ones, hands both to the engine."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax_hetccl._config import Config
from jax_hetccl._errors import PeerLostError, RendezvousError
from jax_hetccl.rdma.ports import Port
from jax_hetccl.rendezvous.acceptor import Acceptor, AcceptorHooks
from jax_hetccl.rendezvous.channels import Opener
from jax_hetccl.rendezvous.control import ControlPlane
from jax_hetccl.rendezvous.handshake import Claim
from jax_hetccl.rendezvous.member import Member

_log = logging.getLogger(__name__)

# Dialing waits for peers, not for our cores.
_DIALERS = 8

Pair = tuple[int, int]
SegmentFactory = Callable[[int, int], list[int]]

# Staging of one direction: a CPU's slots stay in its cache; a GPU's copy engine needs large ones to fill its link, since
# it pauses for some 5 us between two (measured on an H200: 46.8 GB/s with 8 MB, 46.2 with 4 MB, 20 with 256 KB).
_HOST_STAGING = 128 << 10, 16
_MIXED_STAGING = 4 << 20, 8
_GPU_STAGING = 8 << 20, 6


def staging(config: Config, platforms: Iterable[str]) -> tuple[int, int]:
    """Bytes and number of the slots between two ranks, one direction.

    Args:
      config: the settings; a size or number given there wins.
      platforms: of the two ranks.
    """
    gpus = [platform != "cpu" for platform in platforms]
    nbytes, slots = _GPU_STAGING if all(gpus) else _MIXED_STAGING if any(gpus) else _HOST_STAGING
    return nbytes if config.slot_kb is None else config.slot_kb << 10, slots if config.slots is None else config.slots


def rdma_options(config: Config, port: Port) -> dict[str, Any]:
    """How the engine is told of a usable port."""
    assert port.gid is not None
    return {
        "device": port.device,
        "port": port.port,
        "gid_index": port.gid.index,
        "traffic_class": config.ib_tc,
        "timeout": config.ib_timeout,
        "retry_count": config.ib_retry_cnt,
        "on_demand_paging": config.ib_odp,
    }


class Channels(AcceptorHooks):
    """All channels of this process. Thread-safe.

    Each direction of a pair of ranks is opened once, by the process that sends.
    """

    def __init__(
        self,
        engine: Any,
        control: ControlPlane,
        opener: Opener,
        acceptor: Acceptor,
        owner: dict[int, int],
        report: Callable[[str, str], None],
        make_segment: SegmentFactory | None = None,
        staged: Callable[[int, int], tuple[int, int]] = lambda src, dst: _HOST_STAGING,
        ports: Mapping[int, dict[str, Any]] | None = None,
        tls: bool = False,
    ) -> None:
        """Starts to accept.

        Args:
          engine: gets the channels.
          control: tells who is who.
          opener: dials.
          acceptor: accepts; closed with this object.
          owner: rank to member index.
          report: called with kind and message if an incoming channel cannot be used.
          make_segment: makes the shared memory of a shm channel, given bytes and number of its slots; None: tcp only.
          staged: bytes and number of the slots between two ranks.
          ports: how the engine is told of this process's ports for RDMA (`rdma_options`), by their place in what was
            published; without those that cannot be used.
          tls: whether tcp channels are encrypted; the same in all processes.
        """
        self._engine = engine
        self._control = control
        self._opener = opener
        self._acceptor = acceptor
        self._owner = owner
        self._report = report
        self._make_segment = make_segment
        self._staged = staged
        self._lock = threading.Lock()
        self._outgoing: dict[Pair, concurrent.futures.Future[str]] = {}
        self._incoming: dict[Pair, str] = {}
        self._being_set_up: set[Pair] = set()
        self._ports = ports or {}
        self._tls = tls
        # A GPU's slots wait until no exchange holds its stream; the peers' next channels must not wait for that.
        self._taker = concurrent.futures.ThreadPoolExecutor(1, "hetccl-take")
        self._closing = threading.Event()
        acceptor.start(self)

    def ensure(self, pairs: Iterable[Pair]) -> None:
        """Opens the channels `(src, dst)` whose `src` is local and that are not open yet; waits for them.

        Raises:
          RendezvousError: a peer cannot be reached. Other channels may have been opened; calling again
            tries only the missing ones.
        """
        mine: list[Pair] = []
        futures: list[concurrent.futures.Future[str]] = []
        with self._lock:
            for pair in dict.fromkeys(pairs):
                src, dst = pair
                for rank in pair:
                    if rank not in self._owner:
                        raise ValueError(f"there is no rank {rank} in a world of {len(self._owner)}")
                if self._owner[src] != self._control.me or self._owner[dst] == self._control.me:
                    continue
                if pair not in self._outgoing:
                    self._outgoing[pair] = concurrent.futures.Future()
                    mine.append(pair)
                futures.append(self._outgoing[pair])
        if len(mine) == 1:
            self._open(mine[0])
        elif mine:
            with concurrent.futures.ThreadPoolExecutor(min(len(mine), _DIALERS), "hetccl-dial") as pool:
                list(pool.map(self._open, mine))
        for future in futures:
            future.result()

    def _open(self, pair: Pair) -> None:
        src, dst = pair
        future = self._outgoing[pair]
        try:
            member = self._control.members[self._owner[dst]]
            segment = self._make_segment and functools.partial(self._make_segment, *self._staged(src, dst))
            transport = self._hand_over(member, src, dst, segment)
        except BaseException as error:
            with self._lock:
                del self._outgoing[pair]  # the next call tries again
            try:
                error = self._explained(error, src, dst)
            finally:  # others may wait for it
                future.set_exception(error)
        else:
            future.set_result(transport)

    def _explained(self, error: BaseException, src: int, dst: int) -> BaseException:
        """What to raise for a channel that could not be opened: that the peer is gone, if it is."""
        member = self._control.members[self._owner[dst]]
        if not isinstance(error, (RendezvousError, OSError)) or not self._control.gone(member.index):
            return error
        lost = PeerLostError(
            f"{member.name} died, left or became unreachable before the channel of ranks {src} to {dst} was open: {error}"
        )
        lost.__cause__ = error
        return lost

    def _hand_over(self, member: Member, src: int, dst: int, segment: Callable[[], list[int]] | None) -> str:
        """Opens the channel and gives it to the engine; returns its transport."""
        while True:
            transport, fds, link, keys = self._opener.open(member, src, dst, segment)
            more: dict[str, Any] = {} if link is None else {"rdma": self._ports[link.mine.index]}
            if self._tls and transport == "tcp":
                more["tls_keys"] = keys
            try:
                self._engine.add_channel(
                    local_rank=src, peer_rank=dst, outgoing=True, transport=transport, fds=fds, **more
                )
            except RuntimeError as error:
                if "tls_keys" in more:
                    raise RendezvousError(
                        f"the channel of ranks {src} to {dst} to {member.name}: {str(error).removeprefix('hetccl: ')}"
                    ) from None
                if link is None:
                    raise
                self._opener.rdma_failed(member, link, error)  # raises where there is no other transport
            else:
                return transport

    def transports(self) -> dict[Pair, str]:
        """The transport of every open channel."""
        with self._lock:
            outgoing = {p: f.result() for p, f in self._outgoing.items() if f.done() and not f.exception()}
            return {**outgoing, **self._incoming}

    def close(self) -> None:
        """Stops accepting. Channels belong to the engine and end with it."""
        self._closing.set()
        self._acceptor.close()
        self._taker.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Waits for channels still being taken or set up; once the engine is closed, which ends what they wait for."""
        self._taker.shutdown()
        self._acceptor.join()

    # --- AcceptorHooks, on the accept thread -------------------------------------------------

    def key(self, member: int) -> bytes | None:
        """See `AcceptorHooks`."""
        known = 0 <= member < len(self._control.members) and member != self._control.me
        return self._control.pair_key(member) if known else None

    def refusal(self, claim: Claim) -> str | None:
        """See `AcceptorHooks`."""
        if claim.acceptor != self._control.me or self._owner.get(claim.dst) != self._control.me:
            return f"rank {claim.dst} is not here"
        if self._owner.get(claim.src) != claim.dialer:
            return f"rank {claim.src} does not belong to {self._control.members[claim.dialer].name}"
        with self._lock:
            if (claim.src, claim.dst) in self._incoming:
                return "it is open already"
        if claim.transport not in ("tcp", "shm", "rdma"):
            return f"unknown transport {claim.transport!r}"
        if claim.transport == "rdma" and claim.port not in self._ports:
            return f"there is no usable port number {claim.port} here"
        return None

    def blocks(self, claim: Claim) -> bool:
        """See `AcceptorHooks`."""
        return claim.transport == "rdma" or (self._tls and claim.transport == "tcp")

    def opened(self, claim: Claim, fds: list[int], keys: Sequence[bytes]) -> None:
        """See `AcceptorHooks`."""
        if self.blocks(claim):
            self._set_up(claim, fds, {"tls_keys": keys} if keys else {"rdma": self._ports[claim.port]})
            return
        with self._lock:
            self._incoming[claim.src, claim.dst] = claim.transport
        try:
            taken = self._taker.submit(self._take, claim, fds)
        except RuntimeError:  # closing
            _close(fds)
        else:
            taken.add_done_callback(lambda done: _close(fds) if done.cancelled() else None)

    def _set_up(self, claim: Claim, fds: list[int], more: dict[str, Any]) -> None:
        """On a thread of the acceptor's: tries queue pairs or TLS together with the dialer, who decides what comes next if they do not work."""
        pair = claim.src, claim.dst
        with self._lock:
            # Another transport may come meanwhile: its dialer has given up these queue pairs, which then cannot succeed.
            twice = pair in self._being_set_up
            self._being_set_up.add(pair)
        if twice:
            _close(fds)
            _log.warning("channel of ranks %d to %d refused: it is being set up already", *pair)
            return
        try:
            self._add_incoming(claim, fds, **more)
        except RuntimeError as error:
            closing = self._closing.is_set()
            level = logging.INFO if claim.transport == "rdma" or closing else logging.WARNING
            why = str(error).removeprefix("hetccl: ")
            _log.log(level, "no %s channel from rank %d to %d: %s", claim.transport, *pair, why)
            # Of a handshake that failed the dialer knows too; of slots that could not be made it does not.
            if claim.transport == "tcp" and not why.startswith(("TLS", "no TLS")) and not closing:
                self._report("internal", _not_set_up(claim, why))
        else:
            with self._lock:
                self._incoming[pair] = claim.transport
        finally:
            with self._lock:
                self._being_set_up.discard(pair)

    def _add_incoming(self, claim: Claim, fds: list[int], **more: Any) -> None:
        self._engine.add_channel(
            local_rank=claim.dst, peer_rank=claim.src, outgoing=False, transport=claim.transport, fds=fds, **more
        )

    # --- on the thread "hetccl-take" ---------------------------------------------------------

    def _take(self, claim: Claim, fds: list[int]) -> None:
        try:
            self._add_incoming(claim, fds)
        except Exception as error:
            if self._closing.is_set():  # the engine ends what this waits for
                return
            message = _not_set_up(claim, error)
            _log.exception("%s", message)
            self._report("internal", message)


def _not_set_up(claim: Claim, why: object) -> str:
    return f"the channel of ranks {claim.src} to {claim.dst} could not be set up: {why}"


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
