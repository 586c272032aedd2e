"""Optax transformations for training over several clusters; see docs/optax.md.

import jax_hetccl as hetccl

optimizer = optax.chain(hetccl.optax.synchronize(), optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
"""

from __future__ import annotations

from jax_hetccl.optax._diloco import Diloco, DilocoState, diloco
from jax_hetccl.optax._synchronize import SynchronizeState, synchronize

__all__ = ["Diloco", "DilocoState", "SynchronizeState", "diloco", "synchronize"]
