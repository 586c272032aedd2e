"""Looks at this machine as jax_hetccl would use it: what is there, whether that is good, and what to do if not."""

from jax_hetccl.doctor.check import BAD, GOOD, NOTE, Check
from jax_hetccl.doctor.gpu import gpu_checks
from jax_hetccl.doctor.host import host_checks
from jax_hetccl.doctor.rdma import rdma_checks
from jax_hetccl.doctor.software import software_checks

__all__ = ["BAD", "GOOD", "NOTE", "Check", "examine"]


def examine() -> list[Check]:
    """Every check, in the order in which to read them. None needs a GPU, a network, or a world."""
    return [*software_checks(), *host_checks(), *gpu_checks(), *rdma_checks()]
