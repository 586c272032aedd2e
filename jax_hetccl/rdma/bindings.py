"""What pyverbs, rdma-core's Python bindings, says of the devices.

They are optional (``pip install 'jax-hetccl[rdma]'``, or the distribution's ``python3-pyverbs``): the native engine opens
libibverbs itself. They show what the kernel does not, and whether this process may open a device at all.
"""

from __future__ import annotations

import dataclasses
import importlib


@dataclasses.dataclass(frozen=True)
class Details:
    """One device.

    Attributes:
      name: its name.
      firmware: version of its firmware.
      max_mr_size: bytes of the largest memory region it registers.
      max_qp: number of its queue pairs.
      why_not: why it cannot be opened; empty if it can. The rest means nothing then.
    """

    name: str
    firmware: str = ""
    max_mr_size: int = 0
    max_qp: int = 0
    why_not: str = ""


class BindingsError(Exception):
    """pyverbs cannot be used; says why and what to do."""


def describe() -> list[Details]:
    """All devices.

    Raises:
      BindingsError: there is no pyverbs, or not for this Python or this libibverbs.
    """
    try:
        device = importlib.import_module("pyverbs.device")
    except ImportError as error:
        if getattr(error, "name", None) in ("pyverbs", "pyverbs.device"):
            raise BindingsError("pyverbs is not installed: pip install 'jax-hetccl[rdma]'") from None
        raise BindingsError(f"pyverbs does not fit this Python or this libibverbs: {error}") from None
    try:
        names = [entry.name.decode() for entry in device.get_device_list()]
    except Exception as error:  # its errors have a class of their own, and an errno that may be 0
        raise BindingsError(f"pyverbs finds no devices: {error}") from None
    return [_details(device, name) for name in names]


def _details(device, name: str) -> Details:
    try:
        with device.Context(name=name) as context:
            facts = context.query_device()
            return Details(name, _text(facts.fw_version), facts.max_mr_size, facts.max_qp)
    except Exception as error:
        return Details(name, why_not=str(error))


def _text(value: str | bytes) -> str:
    return (value.decode() if isinstance(value, bytes) else value).strip("\0 ")
