"""Makes the first inputs of the targets: well-formed messages, from which a fuzzer finds its way.

python fuzz/seeds.py
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgpack

from jax_hetccl.rendezvous.messages import PROTOCOL

CORPUS = Path(__file__).with_name("corpus")

MAGIC, VERSION, HEADER_BYTES = 0x4C434348, 1, 192
DATA, GOODBYE = 1, 2


def header(payload: int, kind: int = DATA, text: bytes = b"psum", version: int = VERSION) -> bytes:
    """A message's header, as in xla_ffi/transport/message.h."""
    fixed = struct.pack("<IHHIIQQQQQII", MAGIC, version, HEADER_BYTES, kind, 3, 0xE, 7, 1, 9, payload, 0, 1)
    return fixed + text.ljust(128, b"\0")


def checked(data: bytes) -> bytes:
    """With the CRC-32C behind it that a tcp channel with checksums puts there."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return data + struct.pack("<I", crc ^ 0xFFFFFFFF)


def record(role: int, error: int = 0, slots: int = 16, slot_bytes: int = 131072, text: bytes = b"") -> bytes:
    """An endpoint record, as in xla_ffi/transport/rdma/wire.h."""
    fixed = struct.pack("<IHHBBBBHHII", 0x52434348, 1, 256, role, error, 5, 2, 0, 0, 17, 99)
    return fixed + bytes(16) + struct.pack("<QIIII", 4096, 5, 1, slot_bytes, slots) + text.ljust(192, b"\0")


def segment(slot_bytes: int = 4096, slots: int = 2, published: int = 0, size: int | None = None) -> bytes:
    """Size and beginning of a segment, as in xla_ffi/transport/shm/segment.h; its first slot holds a header."""
    size = 4096 + slot_bytes * slots if size is None else size
    control = struct.pack("<QII", 0x31304D4853434348, slot_bytes, slots).ljust(64, b"\0")
    control += struct.pack("<Q", published).ljust(64, b"\0")
    return struct.pack("<Q", size) + control.ljust(4096, b"\0") + header(5) + b"bytes"


SEEDS = {
    "message_head": {
        "data": b"\0" + header(32),
        "goodbye": b"\0" + header(0, GOODBYE),
        "another_world": b"\1" + header(32),
        "another_size": b"\x20" + header(32),
        "long_text": b"\0" + header(32, text=b"x" * 128),
        "control_characters": b"\2" + header(32, text=b"\x1b[31m\n\x7f"),
        "another_version": b"\0" + header(32, version=9),
    },
    "rdma_handshake": {
        "sender_agrees": b"\0\0" + record(2) + b"RK",
        "receiver_agrees": b"\1\0" + record(1, slot_bytes=0) + b"RK",
        "refused_at_once": b"\0\0" + record(2, error=1, text=b"no port"),
        "fails_with_a_reason": b"\0\0" + record(2) + b"RF\x07no route",
        "fails_in_the_middle_of_a_reason": b"\1\0" + record(1, slot_bytes=0) + b"F\xffno",
        "no_probe": b"\0\xff" + record(2) + b"RK",
    },
    "rdma_record": {
        "receiver": b"\0" + record(2),
        "sender": b"\1" + record(1, slot_bytes=0),
        "refuses": b"\0" + record(2, error=1, text=b"the port is not active"),
        "reason_without_end": b"\0" + record(2, error=1, text=b"x" * 192),
        "no_slots": b"\0" + record(2, slots=0),
    },
    "shm_segment": {
        "foreign": b"\0" + segment(published=1),
        "foreign_of_another_size": b"\0" + segment(size=8192),
        "one_message": b"\1\0\x30" + header(5) + b"\1\0",
        "garbage_published": b"\1\0\0\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        "goodbye": b"\1\0\x30" + header(0, GOODBYE) + b"\1\1G",
    },
    "tcp_acknowledgements": {"some": b"\3AAA", "goodbye": b"\2AG", "noise": bytes(range(256))},
    "tcp_stream": {
        "one": b"\0" + header(5) + b"bytes",
        "two_and_goodbye": b"\0" + header(5) + b"bytes" + header(0) + header(0, GOODBYE),
        "cut": b"\0" + header(4000) + b"x" * 100,
        "two_sockets": b"\1" + header(20) + b"x" * 20,
        "huge": b"\0" + header((1 << 64) - 1),
        "checked": b"\x81" + checked(header(5)) + checked(b"bytes") + checked(header(0, GOODBYE)),
        "checked_wrongly": b"\x81" + checked(header(5)) + checked(b"bytes")[:-1] + b"!",
        "two_sockets_checked": b"\x82" + checked(header(20)) + checked(b"x" * 20),
        "http": b"\0GET / HTTP/1.1\r\n\r\n",
    },
}


def parts(*messages: bytes) -> bytes:
    """Messages as `targets.parts` cuts them."""
    return b"".join(struct.pack("<H", len(message)) + message for message in messages)


def claim(dialer: int, stripe: int, stripes: int, transport: bytes) -> bytes:
    """As `handshake.Claim.pack`."""
    return struct.pack("<IIIIHHH8s8s", dialer, 1, 0, 1, stripe, stripes, 0, transport, b"attempt.")


def pack(*fields: object) -> bytes:
    return msgpack.packb(fields, use_bin_type=True)


HELLO = b"HETCCL\x00\x02" + bytes(32)
INSTANCE = b"i" * 16
RECORD = {"curve": b"k" * 40, "control": "tcp://127.0.0.1:1", "holder": "process 1", "data": ["127.0.0.1", 2]}
JOIN = pack("JOIN", PROTOCOL, INSTANCE, RECORD)

SEEDS |= {
    "py_acceptor": {
        "hello": parts(HELLO + claim(0, 0, 1, b"tcp")),
        "hello_and_proof": parts(HELLO + claim(0, 0, 1, b"tcp"), b"p" * 32),
        "bytewise": parts(*(bytes([b]) for b in HELLO)),
        "http": parts(b"GET / HTTP/1.1\r\n\r\n" * 5),
    },
    "py_claims": {
        "one": parts(claim(0, 0, 1, b"tcp")),
        "two_stripes": parts(claim(1, 1, 2, b"tcp") + b"payload", claim(1, 0, 2, b"tcp")),
        "twice_the_same_stripe": parts(claim(1, 1, 2, b"tcp"), claim(1, 1, 2, b"tcp")),
        "stripes_that_differ": parts(claim(1, 0, 2, b"tcp"), claim(1, 1, 3, b"tcp")),
        "no_descriptor": parts(claim(2, 0, 1, b"shm") + b"F"),
        "unknown": parts(claim(9, 9, 0, b"\xff\xfe")),
    },
    "py_message": {
        "join": JOIN,
        "not_a_list": msgpack.packb({"a": 1}),
        "list_as_key": bytes.fromhex("92a1618191010c"),
        "deep": b"\x91" * 600,
        "huge": b"\xdd\xff\xff\xff\xff",
        "timestamp": bytes.fromhex("92a161d7ff00000000ffffffff"),
    },
    "py_joining": {
        "all": parts(*(bytes([n]) + JOIN for n in range(3))),
        "alive_and_leave": parts(
            b"\0" + pack("ALIVE", INSTANCE, 5, "h"), b"\0" + JOIN, b"\0" + pack("LEAVE", INSTANCE)
        ),
        "two_claim_one_seat": parts(b"\0" + JOIN, b"\0" + pack("JOIN", PROTOCOL, b"j" * 16, {})),
        "infinite_epoch": parts(b"\0" + pack("ALIVE", INSTANCE, float("inf"), "h")),
        "number_for_an_instance": parts(b"\0" + pack("JOIN", PROTOCOL, 1 << 40, {})),
        "another_protocol": parts(b"\1" + pack("JOIN", 1, INSTANCE, {})),
        "stranger": parts(b"\3" + JOIN),
    },
    "py_control": {
        "value": parts(pack("DATA", 1, pack("key", [1, {"a": b"b"}]), True)),
        "pieces": parts(
            pack("DATA", 1, pack("key", "value")[:4], False), pack("DATA", 2, pack("key", "value")[4:], True)
        ),
        "acknowledged": parts(pack("ACK", 2), pack("ACK", 99)),
        "acknowledged_text": parts(pack("ACK", "two")),
        "nothing_acknowledged": parts(pack("ACK")),
        "goodbye": parts(pack("DATA", 1, pack("control/goodbye", None), True)),
        "out_of_order": parts(pack("DATA", 5, b"", True), pack("DATA", -1, b"", True)),
        "text_for_bytes": parts(pack("DATA", 1, "text", True)),
    },
    "py_settings": {
        "good": parts(b"127.0.0.1:7000", b"left:1,right:2", b"left", b"0", b"7000-7010", b"^docker,lo", b"data=4"),
        "ipv6": parts(b"[::1]:7000", b"a:1,b:1", b"b", b"0", b"1-2", b"=eth0", b"x,y", b"=mlx5_0:1"),
        "wrong": parts(b"nowhere", b"left:-1", b"\xff", b"1e9", b"9-1", b"^^", b"=", b":", b"password"),
        "sequences": parts(b"a:1", b"c[1-3]:1", b"c2", b"0", b"", b"eth[0-3,7]"),
    },
    "py_port_record": {
        "port": pack("p", {"index": 0, "device": "mlx5_0", "port": 1, "gid": {"index": 3}}),
        "no_gid": pack("p", {"gid": None}),
        "number_for_a_gid": pack("p", {"gid": 5}),
        "text_for_a_gid": pack("p", {"gid": "fe80::"}),
    },
}

for target, inputs in SEEDS.items():
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in inputs.items():
        (folder / name).write_bytes(data)
