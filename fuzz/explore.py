"""Looks for inputs that break a target, with atheris.

python fuzz/explore.py TARGET [arguments of libFuzzer: folders of inputs, -max_total_time=60, ...]
"""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(include=["jax_hetccl"]):
    import targets

logging.disable(logging.CRITICAL)
name = sys.argv.pop(1)
atheris.Setup(sys.argv, targets.TARGETS[name])
atheris.Fuzz()
