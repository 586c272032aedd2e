"""The interpreters of tests with mixed versions.

``HETCCL_TEST_PYTHONS=/path/to/one/python:/path/to/other/python``. The variable is taken out of the environment when the
tests start: jax_hetccl refuses settings under its prefix that it does not know.
"""

from __future__ import annotations

import os

_found = tuple(p for p in os.environ.pop("HETCCL_TEST_PYTHONS", "").split(os.pathsep) if p)


def other_pythons() -> tuple[str, ...]:
    """Two interpreters with different versions of jax, or an empty tuple."""
    return _found if len(_found) == 2 else ()
