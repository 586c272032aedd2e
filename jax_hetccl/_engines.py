"""How a world gets its native engine and the shared memory of its channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_hetccl._config import Config
from jax_hetccl._errors import ConfigError
from jax_hetccl.rendezvous.control import ControlPlane

EngineFactory = Callable[[Config, ControlPlane, frozenset[str]], Any]


# How long a proxy thread spins before it sleeps. A step of an exchange takes a CPU a few microseconds and a GPU's
# copies and marks tens; to sleep in between costs as much again.
_SPIN_US, _GPU_SPIN_US = 50.0, 300.0


def native_engine(config: Config, control: ControlPlane, platforms: frozenset[str]) -> Any:
    """Makes the native engine of this world, of clusters on these platforms."""
    from jax_hetccl import _native

    staging = {} if config.slot_kb is None else {"staging_slot_bytes": config.slot_kb << 10}
    staging |= {} if config.slots is None else {"staging_slots": config.slots}
    return _native.Engine(
        epoch=control.epoch,
        timeout_s=config.timeout,
        arrival_timeout_s=config.arrival_timeout,
        spin_us=_SPIN_US if platforms == {"cpu"} else _GPU_SPIN_US,
        stream_sync=config.stream_sync,
        on_integer_failure={"abort": "exit", "raise": "raise"}[config.on_integer_failure],
        checksum=config.checksum,
        **staging,
    )


def ensure_tls(me: str) -> None:
    """Raises a ConfigError that says what is missing, if `me` cannot do TLS."""
    from jax_hetccl import _native

    try:
        _native.tls_library()
    except RuntimeError as error:
        raise ConfigError(f"{me}: {str(error).removeprefix('hetccl: ')}") from None


def native_segment(slot_bytes: int, slots: int) -> list[int]:
    """Makes the shared memory of a shm channel of the native engine; the caller owns the descriptors."""
    from jax_hetccl import _native

    return _native.make_shm_segment(slot_bytes, slots)
