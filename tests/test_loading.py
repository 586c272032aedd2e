"""Loads of programs are kept apart from exchanges on the GPUs that they concern, and only there."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from jax_hetccl import loading


class Engine:
    """Notes what is asked of it."""

    def __init__(self, free: bool = True) -> None:
        self.free, self.log = free, []

    def section(self, ordinals: list[int]) -> Any:
        def enter(timeout_s: float) -> bool:
            self.log.append(("enter", ordinals, timeout_s))
            return self.free

        return SimpleNamespace(enter=enter, leave=lambda: self.log.append(("leave", ordinals)))


def device(platform: str = "gpu", process: int = 0, local: int = 0) -> Any:
    return SimpleNamespace(id=100 * process + local, platform=platform, process_index=process, local_hardware_id=local)


def world(engine: Engine | None) -> Any:
    return SimpleNamespace(engine=engine, config=SimpleNamespace(arrival_timeout=600.0, timeout=60.0))


def test_the_own_gpus_of_a_program_are_in_a_section():
    engine = Engine()
    section = loading.section(world(engine), [device(local=3), device(process=1, local=1), device(local=5)])
    assert section is not None and not engine.log
    with pytest.raises(ValueError, match="no memory"), section:
        assert engine.log == [("enter", [3, 5], 690.0)]
        raise ValueError("no memory")
    assert engine.log[1:] == [("leave", [3, 5])]


@pytest.mark.parametrize("devices", [[], [device("cpu")], [device(process=1)]])
def test_nothing_is_apart_without_a_gpu_of_this_process(devices):
    assert loading.section(world(Engine()), devices) is None


def test_without_channels_nothing_is_held():
    assert loading.section(world(None), [device()]) is None


def test_a_load_beside_a_hold_is_told(caplog):
    engine = Engine(free=False)
    section = loading.section(world(engine), [device()])
    assert section is not None
    with caplog.at_level(logging.WARNING), section:
        pass
    assert "still held for an exchange after 690 s" in caplog.text
    assert [what for what, *_ in engine.log] == ["enter", "leave"]
