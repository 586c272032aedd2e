"""The native half of jax_hetccl: the exchange engine and its XLA custom calls.

All functions and methods are thread-safe. Errors of the caller are `RuntimeError`s whose text names the fix.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

class Failure:
    """Why a world failed.

    Args:
      kind: "peer_lost", "corrupt", "mismatch", "timeout", "aborted" or "internal".
      message: names operation, peer, and what to do.
      lost_rank: the rank whose process is gone, if that is what failed; -1 if not.
    """

    def __init__(self, kind: str, message: str, lost_rank: int = -1) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def lost_rank(self) -> int: ...

class PeerStats(TypedDict):
    """Payload bytes and messages exchanged with one rank."""

    bytes_sent: int
    bytes_received: int
    messages_sent: int
    messages_received: int

class DeviceStats(TypedDict):
    """What the engine holds of one GPU."""

    platform: str
    name: str
    stream_sync: str
    streams: int
    flags: int
    events: int
    pinned_bytes: int
    registered_bytes: int
    allocations: int
    """Allocations ever made through the driver: constant once a program has run."""

class RoutedChannel(TypedDict):
    """A channel that goes by a device of its own, an RDMA NIC's port."""

    local_rank: int
    peer_rank: int
    outgoing: bool
    device: str
    port: int
    slots: str
    """Where the slots lie and why there, and how buffers are registered."""
    bytes_copied: int
    """Payload bytes that this side's CPU has copied: large messages between CPUs need none."""
    registrations: int
    """Of memory with the device that this process has made, for all of its channels."""

class Gid(TypedDict):
    """One entry of a port's table of addresses."""

    index: int
    gid: str
    """Eight groups of four hexadecimal digits."""
    type: str
    """"RoCE v2", "RoCE v1" or "IB"."""
    netdev: str
    """The network interface; empty where it has none."""

class RdmaPort(TypedDict):
    """A port of an RDMA device."""

    name: str
    port: int
    state: str
    """"ACTIVE", "DOWN", "INIT" or "ARMED"."""
    link_layer: str
    """"Ethernet" or "InfiniBand"."""
    transport: str
    """"InfiniBand" (RoCE too), "iWARP" or "other"; channels need the first."""
    active_mtu: int
    """Bytes."""
    speed_gbps: float
    """0 if unknown."""
    lid: int
    gids: list[Gid]
    numa: int
    """The node; -1 if unknown."""
    pci: str
    """"0000:3b:00.0"; empty for software devices."""
    dmabuf: bool
    """Whether the library can register a dma-buf; whether the NIC can shows when it is tried."""

class RdmaOptions(TypedDict, total=False):
    """How an rdma channel uses its NIC.

    Args:
      device: of `rdma_devices`. Needed.
      port: from 1 on.
      gid_index: into the port's table.
      traffic_class: of the IP header, 0 to 255.
      timeout: 4.096 us * 2**timeout until a packet is sent again, 1 to 31.
      retry_count: 0 to 7; software RoCE takes 7 for without end.
      on_demand_paging: whether registrations of buffers are kept if the NIC follows the page tables.
    """

    device: str
    port: int
    gid_index: int
    traffic_class: int
    timeout: int
    retry_count: int
    on_demand_paging: bool

class Stats(PeerStats):
    """Totals, and what makes them up."""

    peers: dict[int, PeerStats]
    in_flight: int
    """Exchanges begun and not complete."""
    copies: int
    """Exchanges whose buffers XLA moved between start and done: not zero is a defect."""
    threads: Mapping[str, int]
    devices: Mapping[int, DeviceStats]
    routed: list[RoutedChannel]

class Section:
    """Time in which no stream of some GPUs is held: exchanges that have to be waited for are waited for on the host."""

    def enter(self, timeout_s: float) -> bool:
        """Opens the section and waits, without the GIL, for the streams that are held now.

        Returns:
          Whether none is held any more; it is open in both cases.
        """

    def leave(self) -> None:
        """Closes the section. Does nothing if it is not open."""

class Engine:
    """All channels, plans and native threads of this process in one world.

    Closes itself, bounded, when the last reference goes; call `close` to do it in time.

    Args:
      epoch: identity of the world; messages of other epochs are refused.
      timeout_s: seconds that a transfer may make no progress.
      arrival_timeout_s: seconds that a peer may take to reach an operation.
      mismatch_grace_s: seconds after which a message of another program counts as a mismatch.
      abort_grace_s: seconds after which the engine adopts its own failure if nobody calls `abort`.
      proxy_threads: threads that move data; 0 chooses by the number of cores.
      spin_us: microseconds that such a thread spins before it sleeps.
      stream_sync: how streams of GPUs wait for the host: "memops" (stream memory operations), "hostfunc" (host
        functions) or "auto" (memops where the device has them).
      on_integer_failure: "exit" ends the process with the error if an exchange into buffers without a NaN fails on a
        GPU; "raise" delivers zeros.
      staging_slot_bytes: of a pinned slot of one lane of a tcp channel of a GPU, one direction.
      staging_slots: their number.
      copy_threads: threads that copy for the CPU side of a channel with a GPU; 0 chooses by the number of cores.
      checksum: whether what goes over tcp carries checksums; the same in all processes of a world.

    Example:
      >>> engine = Engine(epoch=1)
      >>> engine.set_local_device(0, rank=0)
      >>> engine.add_channel(local_rank=0, peer_rank=1, outgoing=True, transport="tcp", fds=[sock.detach()])
    """

    def __init__(
        self,
        *,
        epoch: int,
        timeout_s: float = 60.0,
        arrival_timeout_s: float = 600.0,
        mismatch_grace_s: float = 2.0,
        abort_grace_s: float = 2.0,
        proxy_threads: int = 0,
        spin_us: float = 50.0,
        stream_sync: str = "auto",
        on_integer_failure: str = "exit",
        staging_slot_bytes: int = ...,
        staging_slots: int = ...,
        copy_threads: int = 0,
        checksum: bool = ...,
    ) -> None: ...
    def set_local_device(self, device_ordinal: int, rank: int, platform: str = "cpu") -> None:
        """Says which rank the device has that XLA calls `device_ordinal` in its custom calls.

        Comes before the rank's channels and plans.

        Args:
          device_ordinal: the global device id on "cpu", else the driver's ordinal.
          rank: its rank.
          platform: "cpu", "CUDA" or "ROCM"; the last two open the vendor's driver and the device.

        Raises:
          RuntimeError: the driver, a symbol of it or the device is missing; says which.
        """

    def section(self, device_ordinals: Sequence[int]) -> Section:
        """A section of these GPUs, not entered yet; of other devices, nothing."""

    def set_rank_name(self, rank: int, name: str) -> None:
        """Names a rank for error messages, e.g. "left/0 rank 2"."""

    def set_program(self, program_id: int, text: str) -> None:
        """Names a program for error messages."""

    def add_channel(
        self,
        *,
        local_rank: int,
        peer_rank: int,
        outgoing: bool,
        transport: str,
        fds: Sequence[int],
        rdma: RdmaOptions | None = None,
        tls_keys: Sequence[bytes] = (),
    ) -> None:
        """Connects one direction between two ranks.

        Args:
          local_rank: a rank of this process.
          peer_rank: the other one.
          outgoing: whether the local rank sends.
          transport: "tcp", "shm" or "rdma".
          fds: owned by the engine from now on, also if this fails. "tcp": connected stream sockets, in the same
            order on both sides. "shm": a connected stream socket and the memfd of `make_shm_segment`. "rdma": a
            connected stream socket, on which both ends are in this call at the same time.
          rdma: for "rdma", how the NIC is used. The call connects a queue pair with the peer's and tries it out both
            ways, which takes 20 s at most; the GIL is released meanwhile.
          tls_keys: for "tcp", 32 bytes for each socket, which its two ends alone have and use for nothing else: what
            goes over the sockets is in TLS 1.3. Both ends are in this call at the same time then; it waits at most 60 s
            for the handshakes of all sockets. Empty: no TLS.

        Raises:
          RuntimeError: unknown transport, unusable descriptors, the channel exists, or the engine is closed. "rdma":
            device, port and reason if it cannot be used; both ends get an error then, and neither has a channel. TLS:
            what is missing, or both addresses and the reason.
        """

    def add_plan(
        self,
        plan_id: int,
        text: str,
        wire_id: int,
        device_ordinal: int,
        sends: Sequence[tuple[int, int, int, int]],
        recvs: Sequence[tuple[int, int, int, int]],
        fills: Sequence[tuple[int, int, int]] = ...,
    ) -> None:
        """Says what the exchange `plan_id` does on one device. Adding the same again does nothing.

        Args:
          plan_id: unsigned 64 bits; the custom call carries it.
          text: the operation for people.
          wire_id: what both sides must agree on, unsigned 64 bits.
          device_ordinal: see `set_local_device`, which must come first.
          sends: (peer rank, operand, byte offset, bytes); all with one peer travel as one message, in this order.
          recvs: likewise for results.
          fills: (result, byte offset, bytes) that are set to zero.

        Raises:
          RuntimeError: the id is in use for something else, or the device has no rank.
        """

    def wait_failure(self, timeout_s: float) -> Failure | None:
        """Waits for the first failure that this engine notices; returns the same one ever after.

        Returns:
          The failure; None after `timeout_s` or when the engine is closed. The GIL is released meanwhile.
        """

    def abort(self, kind: str, message: str) -> None:
        """Adopts the world's first error: all exchanges, pending and later ones, complete as failed.

        Does nothing if an error was adopted before.
        """

    def failure(self) -> Failure | None:
        """The adopted error."""

    def pending(self) -> list[str]:
        """One line for each message that is queued or moving: operation, ranks, bytes."""

    def waits(self) -> list[tuple[int, int, str]]:
        """What `pending` returns, each with the peer's rank and the program's id in front."""

    def stats(self) -> Stats:
        """What was moved so far."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Fails what is pending, says goodbye to the peers and joins all threads. Idempotent.

        Raises:
          RuntimeError: threads did not end in time.
        """

def set_engine(engine: Engine | None) -> None:
    """Makes this the engine that the custom calls of this process use."""

def registrations(platform: str = "cpu") -> dict[str, Any]:
    """Custom call targets for a platform ("cpu", "CUDA", "ROCM") by name, for `jax.ffi.register_ffi_target`."""

def make_shm_segment(slot_bytes: int = ..., slots: int = ...) -> list[int]:
    """Makes the shared memory of one channel; the sender's side passes it on.

    Returns:
      Descriptors, owned by the caller.

    Raises:
      RuntimeError: sizes that make no sense, or no memory.
    """

def tls_library() -> str:
    """The OpenSSL that TLS uses, as it calls itself.

    Raises:
      RuntimeError: there is none; names the library or what it lacks.
    """

def kernel_tls_missing() -> str:
    """Why the kernel does not encrypt what senders in TLS send; "" if it does. The first call tries it."""

def rdma_devices() -> list[RdmaPort]:
    """All ports of the RDMA devices of this machine that can be opened.

    Raises:
      RuntimeError: libibverbs, or a symbol of it, is missing; says which, and which version has it.
    """

def why_not_on_demand(rdma: RdmaOptions, /) -> str:
    """Why `on_demand_paging` would change nothing on this port; empty if registrations would be kept.

    Tries it out, without the GIL, unless a channel by this device has: waits, for seconds at most.

    Args:
      rdma: `device`, `port` and `gid_index` matter.
    """

def keep_freed_memory(bytes: int) -> bool:
    """Makes the C library keep at most so much freed memory for the next step; False where it cannot be told."""

def protocol_version() -> int:
    """The version that both ends of a channel must share."""
