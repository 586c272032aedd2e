"""A member of a world in a process of its own, for strangers to knock at: `tests/test_strangers.py`.

    python besieged.py PORT SECRET DESCRIPTORS

Joins the clusters left:1,right:1 as left/0, hosts the coordinator, takes channels, and says what it sees of right/0.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Sequence

from meeting import config

from jax_hetccl.rendezvous import channels
from jax_hetccl.rendezvous.acceptor import Acceptor, AcceptorHooks
from jax_hetccl.rendezvous.handshake import Claim
from jax_hetccl.rendezvous.join import join


def say(*words: object) -> None:
    print(json.dumps(words), flush=True)


class Hooks(AcceptorHooks):
    def __init__(self, control) -> None:
        self._control = control

    def key(self, member: int) -> bytes | None:
        return self._control.pair_key(member) if member == 1 else None

    def refusal(self, claim: Claim) -> str | None:
        return None

    def blocks(self, claim: Claim) -> bool:
        return False

    def opened(self, claim: Claim, fds: list[int], keys: Sequence[bytes]) -> None:
        say("channel", claim.src, claim.dst)
        for fd in fds:
            os.close(fd)


def main() -> None:
    port, secret, descriptors = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    settings = config("left/0", port, clusters="left:1,right:1", secret=secret)
    listening, record = channels.listeners(settings)
    acceptor = Acceptor(listening)
    control = join(settings, record)
    acceptor.start(Hooks(control))
    control.subscribe("", lambda member, key, value: say("heard", member, key))
    sys.stdin.read()  # until the test is over
    acceptor.close()
    control.close()


main()
