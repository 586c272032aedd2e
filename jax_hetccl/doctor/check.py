"""One finding."""

from __future__ import annotations

import dataclasses

GOOD, NOTE, BAD = "good", "note", "bad"


@dataclasses.dataclass(frozen=True)
class Check:
    """What was looked at.

    Attributes:
      name: short, e.g. ``"memlock"``.
      found: what is there.
      state: GOOD; NOTE: works, but something is missing or slower; BAD: jax_hetccl cannot work like this.
      fix: what to do; empty if nothing.
    """

    name: str
    found: str
    state: str = GOOD
    fix: str = ""
