"""How a failed program ended: on every device, in every process, and what `hetccl.check` says afterwards."""

from __future__ import annotations

import re

from harness import platforms
from harness.pool import Reply, World


def first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


def messages(reply: Reply) -> dict[str, str]:
    """Device position -> text of the error it raised; every device must have raised one.

    An error at the call itself, before there are arrays, counts for all devices. A GPU raises nothing: its program ends
    with poisoned values, and what `check` raises then counts for its devices.
    """
    if reply.error is not None:
        assert "jax_hetccl" not in reply.error["bases"][0] or reply.error["message"], reply.error
        return {"all": reply.error["message"]}
    devices = reply.raw["devices"]
    if platforms.on_gpu(reply.cluster):
        health = (reply.health or {}).get("message", "")
        return {at: error["message"] if error else health for at, error in devices.items()}
    quiet = [at for at, error in devices.items() if error is None]
    assert devices and not quiet, f"{reply.label}: devices {quiet} of {list(devices)} ended without an error"
    for at, error in devices.items():
        assert any(b.endswith(".JaxRuntimeError") for b in error["bases"]), f"{reply.label} rank {at}: {error['bases']}"
    return {at: error["message"] for at, error in devices.items()}


def all_failed(replies: list[Reply], kind: str, *patterns: str) -> None:
    """Every device of every process raised the same first error, which matches all patterns, and `check` raises it.

    Args:
        replies: answers to an ``each_device`` run.
        kind: class of the error that `hetccl.check` must raise.
        patterns: regular expressions that each error's text must match.
    """
    assert replies
    core: set[str] = set()
    for reply in replies:
        assert reply.health is not None, f"{reply.label}: check() raises nothing after {reply.raw}"
        names = [b.rsplit(".", 1)[-1] for b in reply.health["bases"]]
        assert kind in names, f"{reply.label}: check() raises {reply.health['trace']}, expected {kind}"
        core.add(first_line(reply.health["message"]))
        for at, text in messages(reply).items():
            for pattern in patterns:
                assert re.search(pattern, text), f"{reply.label} rank {at}: no {pattern!r} in {text!r}"
            assert first_line(reply.health["message"]) in text, (
                f"{reply.label} rank {at}: the device raised {text!r}, check() raises {reply.health['message']!r}"
            )
    assert len(core) == 1, "processes report different first errors:\n" + "\n".join(sorted(core))


def still_alive(world: World, *gone: str) -> None:
    """The survivors' processes run, answer, and a further spanning program fails at once instead of hanging."""
    for _, worker in world.workers:
        if worker.label not in gone:
            worker.ask(op="ping")
            assert "error" not in worker.answer(10), f"{worker.label} does not answer"
