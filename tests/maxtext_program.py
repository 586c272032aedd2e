"""A run of MaxText for tests/test_maxtext.py: linked clusters under ``hetccl run``, one stock world otherwise.

    maxtext_program.py FOLDER [MaxText's arguments]

The data is MaxText's synthetic batch with padding, so that every row has another number of tokens that count. At the end
each cluster writes its whole training state to FOLDER/CLUSTER.npz, and its metrics to FOLDER/CLUSTER.jsonl, a line for each
step and evaluation.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jax_hetccl.integrations.maxtext.__main__ import main as linked


def padded(rows: int, length: int, _segments: int) -> jax.Array:
    """Segments of a batch: the first ones of each row count, in row 0 half of them, later ever fewer and then more again."""
    counted = length // 2 - (jnp.arange(rows) * 5) % (length // 2 - 1)
    return (jnp.arange(length)[None] < counted[:, None]).astype(jnp.int32)


def main(folder: str, arguments: list[str]) -> int:
    name = os.environ.get("HETCCL_CLUSTER", "stock")
    importlib.import_module("maxtext.input_pipeline.synthetic_data_processing")._make_packed_segment_ids = padded
    train = importlib.import_module("maxtext.trainers.pre_train.train")
    train_loop = train.train_loop

    def keeping(*args, **kwargs):
        state = train_loop(*args, **kwargs)
        arrays = {}
        for path, leaf in jax.tree.leaves_with_path(state):
            keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            arrays[jax.tree_util.keystr(path)] = np.asarray(jax.random.key_data(leaf) if keys else leaf)
        np.savez(os.path.join(folder, f"{name}.npz"), **arrays)
        return state

    logger = importlib.import_module("maxtext.common.metric_logger").MetricLogger
    log_metrics = logger.log_metrics

    def noting(self, metrics, step, metric_type):
        scalars = {key: float(value) for key, value in metrics["scalar"].items()}
        with open(os.path.join(folder, f"{name}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"type": metric_type, "step": int(step), **scalars}) + "\n")
        return log_metrics(self, metrics, step, metric_type)

    train.train_loop, logger.log_metrics = keeping, noting
    if "HETCCL_CLUSTER" in os.environ:
        return linked(arguments)
    importlib.import_module("absl.app").run(
        train.main, argv=["maxtext", *arguments, "skip_jax_distributed_system=true"]
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
