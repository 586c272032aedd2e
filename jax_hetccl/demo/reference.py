"""The same steps in one JAX world, without jax_hetccl. Run by path: `python -P reference.py`.

Importing `jax_hetccl.demo` would import jax_hetccl, so the package of this file is loaded under another name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

_NAME = "stock_demo"


def main() -> None:
    """Trains the whole global batch on the devices of this one process, reports."""
    folder = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[_NAME] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    corpus, options, records, training = (
        importlib.import_module(f"{_NAME}.{module}") for module in ("corpus", "options", "records", "training")
    )
    given = options.parse()
    reporter = records.Reporter(given.reports / "reference-0.jsonl")
    trainer = training.Trainer(corpus.Corpus.load(given.corpus), training.Share(0, given.rows_per_device), seed=0)
    reporter.train(trainer, given.steps)
    if "jax_hetccl" in sys.modules:
        raise RuntimeError("the reference must not use jax_hetccl, but something imported it")


if __name__ == "__main__":
    main()
