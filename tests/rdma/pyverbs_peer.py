"""The other end of an rdma channel, written with pyverbs after xla_ffi/transport/rdma/wire.h: an independent peer."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import socket
import struct
import time
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

SENDER, RECEIVER = 1, 2
GRANTS_MEMORY = 1
GRANTS = 16
MESSAGE, HEADER, CHUNK, DIRECT, CREDIT, GRANT, USE_SLOTS, PROBE = range(1, 9)
HEADER_BYTES = 192
BOARD_BYTES = 64 + 16 * GRANTS
PROBE_OFFSET = 8
SCRATCH_BYTES = 1 << 20
WAIT_S = 10.0


@dataclasses.dataclass
class Record:
    """What the ends tell each other of themselves."""

    role: int
    mtu: int
    link_layer: int
    queue_pair: int
    packet_number: int
    gid: bytes
    address: int
    rkey: int
    flags: int = 0
    slot_bytes: int = 0
    slots: int = 0
    lid: int = 0
    error: int = 0
    text: bytes = b""

    LAYOUT = struct.Struct("<IHHBBBBHHII16sQIIII192s")
    MAGIC, VERSION = 0x52434348, 1

    def pack(self) -> bytes:
        return self.LAYOUT.pack(
            self.MAGIC, self.VERSION, self.LAYOUT.size, self.role, self.error, self.mtu, self.link_layer, self.lid, 0,
            self.queue_pair, self.packet_number, self.gid, self.address, self.rkey, self.flags, self.slot_bytes,
            self.slots, self.text,
        )  # fmt: skip

    @classmethod
    def unpack(cls, data: bytes) -> Record:
        (
            magic,
            version,
            size,
            role,
            error,
            mtu,
            layer,
            lid,
            _,
            qp,
            psn,
            gid,
            address,
            rkey,
            flags,
            nbytes,
            slots,
            text,
        ) = cls.LAYOUT.unpack(data)
        assert (magic, version, size) == (cls.MAGIC, cls.VERSION, cls.LAYOUT.size)
        return cls(role, mtu, layer, qp, psn, gid, address, rkey, flags, nbytes, slots, lid, error, text.rstrip(b"\0"))


class End:
    """One queue pair, with a stream to the other end.

    Args:
      stream: the channel's stream socket.
      device: its name; port 1.
      gid_index: of the port's GIDs.
      role: SENDER or RECEIVER.
      memory: bytes that the other end may write to.
      slots: of the receiver.
      slot_bytes: their size.
    """

    def __init__(
        self, stream: socket.socket, device: str, gid_index: int, role: int, memory: int, slots: int = 0,
        slot_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.stream = stream
        stream.settimeout(WAIT_S)
        self.context = Context(name=device)
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 512)
        cap = QPCap(max_send_wr=128, max_recv_wr=256, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1))
        access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = access
        self.qp.to_init(attributes)
        self.memory = MR(self.pd, memory, access)
        self.scratch = MR(self.pd, SCRATCH_BYTES, e.IBV_ACCESS_LOCAL_WRITE)
        self.gid_index = gid_index
        gid = ipaddress.IPv6Address(str(self.context.query_gid(1, gid_index))).packed
        self.mine = Record(
            role, e.IBV_MTU_1024, e.IBV_LINK_LAYER_ETHERNET, self.qp.qp_num, 0x123456, gid, self.memory.buf,
            self.memory.rkey, slot_bytes=slot_bytes, slots=slots,
        )  # fmt: skip
        self.immediates: list[tuple[int, int]] = []
        self.posted = self.completed = 0

    def connect(self, receives: int) -> None:
        """The handshake, up to both verdicts: the receiver's comes first."""
        self.probe(receives)
        if self.mine.role == RECEIVER:
            self.stream.sendall(b"K")
        verdict = self.read(1)
        assert verdict == b"K", self.read(self.read(1)[0])
        if self.mine.role == SENDER:
            self.stream.sendall(b"K")

    def probe(self, receives: int) -> None:
        """The handshake, up to the verdicts."""
        self.stream.sendall(self.mine.pack())
        self.theirs = Record.unpack(self.read(Record.LAYOUT.size))
        assert not self.theirs.error, self.theirs.text
        assert self.theirs.role == 3 - self.mine.role
        self.receive(receives)
        attributes = QPAttr()
        attributes.path_mtu = min(self.mine.mtu, self.theirs.mtu)
        attributes.dest_qp_num = self.theirs.queue_pair
        attributes.rq_psn = self.theirs.packet_number
        attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = 12
        route = GlobalRoute(dgid=GID(ipaddress.IPv6Address(self.theirs.gid).exploded), sgid_index=self.gid_index)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self.qp.to_rtr(attributes)
        attributes.sq_psn = self.mine.packet_number
        attributes.timeout, attributes.rnr_retry, attributes.max_rd_atomic = 14, 7, 1
        attributes.retry_cnt = 6  # software RoCE takes 7 for without end
        self.qp.to_rts(attributes)
        self.stream.sendall(b"R")
        assert self.read(1) == b"R"
        self.write(b"probe...", self.theirs.address + PROBE_OFFSET, immediate=(PROBE, 0))
        assert self.next_immediate() == (PROBE, 0)
        self.finish()
        self.receive(1)

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.stream.recv(count - len(data))
            assert part, "the other end closed the stream"
            data += part
        return data

    def receive(self, count: int) -> None:
        """Posts receives, for immediates."""
        for _ in range(count):  # pyverbs wants memory with each; what a write brings does not go there
            self.qp.post_recv(RecvWR(num_sge=1, sg=[SGE(self.scratch.buf, 1, self.scratch.lkey)]))

    def write(
        self, data: bytes, address: int, rkey: int | None = None, immediate: tuple[int, int] | None = None
    ) -> None:  # fmt: skip
        """Writes to the other end's memory, in pieces; the immediate comes with the last one."""
        pieces = [data[at : at + SCRATCH_BYTES] for at in range(0, len(data), SCRATCH_BYTES)]
        for number, piece in enumerate(pieces, 1):
            self._write(piece, address, rkey, immediate if number == len(pieces) else None)
            address += len(piece)
            if number < len(pieces):
                self.finish()  # the scratch memory is used again

    def _write(self, data: bytes, address: int, rkey: int | None, immediate: tuple[int, int] | None) -> None:
        self.scratch.write(data, len(data), 0)
        opcode = e.IBV_WR_RDMA_WRITE if immediate is None else e.IBV_WR_RDMA_WRITE_WITH_IMM
        kind, value = immediate or (0, 0)
        number = kind << 28 | value & ((1 << 28) - 1)
        sge = SGE(self.scratch.buf, len(data), self.scratch.lkey)
        request = SendWR(
            opcode=opcode, num_sge=1, sg=[sge], imm_data=socket.htonl(number), send_flags=e.IBV_SEND_SIGNALED
        )
        request.set_wr_rdma(self.theirs.rkey if rkey is None else rkey, address)
        self.qp.post_send(request)
        self.posted += 1

    def poll(self) -> None:
        """Takes in completions."""
        count, completions = self.cq.poll(16)
        for completion in completions[:count]:
            if completion.status != e.IBV_WC_SUCCESS:
                raise RuntimeError(f"completion status {completion.status}")
            if completion.opcode & e.IBV_WC_RECV:
                number = socket.ntohl(completion.imm_data)
                self.immediates.append((number >> 28, number & ((1 << 28) - 1)))
            else:
                self.completed += 1

    def until(self, condition: Any, what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            self.poll()
            if time.monotonic() > end:
                raise TimeoutError(f"no {what} in {WAIT_S:.0f} s")
            os.sched_yield()  # one CPU: the other end's NIC is a thread of the same kernel

    def next_immediate(self) -> tuple[int, int]:
        self.until(lambda: self.immediates, "immediate")
        return self.immediates.pop(0)

    def finish(self) -> None:
        """Waits until all writes have completed."""
        self.until(lambda: self.completed == self.posted, "completion")

    def close(self) -> None:
        self.stream.close()
        for each in (self.qp, self.cq, self.memory, self.scratch, self.pd, self.context):
            each.close()


class Receiver(End):
    """The receiving end: takes messages out of slots. Grants no memory, so everything comes in slots."""

    def __init__(
        self, stream: socket.socket, device: str, gid_index: int, slots: int = 4, slot_bytes: int = 4096
    ) -> None:
        super().__init__(stream, device, gid_index, RECEIVER, slots * slot_bytes, slots, slot_bytes)
        self.taken = 0

    def connect(self) -> None:  # type: ignore[override]
        super().connect(self.mine.slots + GRANTS + 1)
        self.slots = min(self.mine.slots, self.theirs.slots)

    def message(self) -> tuple[bytes, bytes]:
        """The next message: header and payload."""
        kind, _ = self.next_immediate()
        size = struct.unpack_from("<Q", self._slot(HEADER_BYTES), 48)[0]
        header = self._slot(HEADER_BYTES)
        if kind == MESSAGE:
            payload = self._slot(HEADER_BYTES + size)[HEADER_BYTES:]
            self._free()
            return header, payload
        assert kind == HEADER, kind
        self._free()
        payload = b""
        while len(payload) < size:
            kind, count = self.next_immediate()
            assert kind == CHUNK, kind
            payload += self._slot(count)
            self._free()
        return header, payload

    def _slot(self, count: int) -> bytes:
        return self.memory.read(count, self.taken % self.slots * self.mine.slot_bytes)

    def _free(self) -> None:
        self.receive(1)
        self.taken += 1
        self.write(struct.pack("<Q", self.taken), self.theirs.address, immediate=(CREDIT, self.taken))
        self.finish()


class Grantor(Receiver):
    """A receiving end that grants memory, with a key that does not open it."""

    def __init__(self, stream: socket.socket, device: str, gid_index: int) -> None:
        super().__init__(stream, device, gid_index)
        self.mine.flags = GRANTS_MEMORY

    def grant_with_a_wrong_key(self, nbytes: int) -> None:
        """Waits for a message's header, and grants memory for its payload."""
        kind, _ = self.next_immediate()
        assert kind == HEADER, kind
        grant = struct.pack("<QII", self.memory.buf, self.memory.rkey ^ 0x5500, nbytes)
        self.write(
            grant, self.theirs.address + 64, immediate=(GRANT, 1)
        )  # what completes, and how, is another question


class Sender(End):
    """The sending end: fills slots, or the memory that the receiver grants."""

    def __init__(self, stream: socket.socket, device: str, gid_index: int) -> None:
        super().__init__(stream, device, gid_index, SENDER, BOARD_BYTES, slots=32)
        self.sent = self.freed = self.grants_seen = self.grants_filled = 0
        self.direct_bytes = 0
        self.use_slots = False

    def connect(self) -> None:  # type: ignore[override]
        super().connect(2 * self.mine.slots + GRANTS + 2)
        self.slots = min(self.mine.slots, self.theirs.slots)

    def send(self, header: bytes, payload: bytes) -> None:
        """Sends one message."""
        if HEADER_BYTES + len(payload) <= self.theirs.slot_bytes:
            self._slot(header + payload, (MESSAGE, 0))
            return
        self.use_slots = not self.theirs.flags & GRANTS_MEMORY
        self._slot(header, (HEADER, 0))
        at = 0
        while at < len(payload):
            self.until(lambda: self._news() or self.use_slots or self.grants_filled < self.grants_seen, "grant")
            if self.grants_filled < self.grants_seen:
                place = 64 + self.grants_filled % GRANTS * 16
                address, rkey, count = struct.unpack("<QII", self.memory.read(16, place))
                self.write(payload[at : at + count], address, rkey, (DIRECT, self.grants_filled))
                self.grants_filled += 1
                self.direct_bytes += count
            else:
                count = min(len(payload) - at, self.theirs.slot_bytes)
                self._slot(payload[at : at + count], (CHUNK, count))
            self.finish()
            at += count

    def _slot(self, data: bytes, immediate: tuple[int, int]) -> None:
        self.until(lambda: self._news() or self.sent < self.freed + self.slots, "free slot")
        place = self.theirs.address + self.sent % self.slots * self.theirs.slot_bytes
        self.write(data, place, immediate=immediate)
        self.sent += 1
        self.finish()

    def _news(self) -> bool:
        """Takes in what the receiver said; never by itself a reason to go on."""
        while self.immediates:
            kind, value = self.immediates.pop(0)
            self.receive(1)
            if kind == CREDIT:
                self.freed = struct.unpack("<Q", self.memory.read(8, 0))[0]
                assert self.freed & ((1 << 28) - 1) >= value
            elif kind == GRANT:
                self.grants_seen += value
            elif kind == USE_SLOTS:
                self.use_slots = True
            else:
                raise AssertionError(f"immediate {kind}")
        return False


def say_goodbye(end: End) -> None:
    """Ends the channel in order."""
    end.stream.sendall(b"G")
    end.close()
