"""Inputs that a fuzzer has found, or should begin with, break nothing; `.ci/nightly` looks for more."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parent.parent / "fuzz"

spec = importlib.util.spec_from_file_location("fuzz_targets", FUZZ / "targets.py")
assert spec and spec.loader
targets = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = targets
spec.loader.exec_module(targets)


@pytest.mark.parametrize("target", targets.TARGETS)
def test_the_corpus_breaks_nothing(target):
    assert targets.replay(target) >= 3


def test_every_corpus_has_a_target():
    native = {path.stem for path in (FUZZ.parent / "xla_ffi" / "fuzz").glob("*.cc")} - {"replay"}
    python = {f"py_{name}" for name in targets.TARGETS}
    assert {path.name for path in (FUZZ / "corpus").iterdir()} == native | python
    size = sum(path.stat().st_size for path in (FUZZ / "corpus").rglob("*") if path.is_file())
    assert size < 200_000, "a corpus is for replaying in seconds; keep what reaches something new"
