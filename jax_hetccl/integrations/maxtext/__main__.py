"""``python -m jax_hetccl.integrations.maxtext``: MaxText's training, over all clusters."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import jax_hetccl as hetccl
from jax_hetccl._errors import ConfigError
from jax_hetccl.integrations.maxtext import names, settings

_USAGE = f"""\
usage: python -m jax_hetccl.integrations.maxtext CONFIG.yml [KEY=VALUE | CLUSTER:KEY=VALUE] ...

Trains with MaxText {names.VERSION} over all clusters. Arguments are MaxText's own; CLUSTER:KEY=VALUE is one for that
cluster only. Each process of each cluster runs it, with HETCCL_* settings as for every program; on one machine:

  hetccl run --cluster left=1x2 --cluster right=1x1@cpu -- \\
    python -m jax_hetccl.integrations.maxtext base.yml hardware=cpu run_name=two steps=10 right:per_device_batch_size=4

docs/maxtext.md says what a global batch is, what is written where, and which settings are refused.
"""


def main(argv: Sequence[str]) -> int:
    """Runs MaxText's training. Returns the exit status."""
    if not argv or {"-h", "--help"} & set(argv):
        print(_USAGE, end="")
        return 0 if argv else 2
    try:
        names.check()
    except ConfigError as error:
        print(f"jax_hetccl.integrations.maxtext: {error}", file=sys.stderr)
        return 2
    world = hetccl.initialize()
    from jax_hetccl.integrations.maxtext.install import install

    clusters = [info.name for info in world.clusters]
    arguments = settings.arguments(argv, clusters[world.cluster], clusters)
    install()
    # As MaxText's own module does: absl's flags and its logging.
    importlib.import_module("absl.app").run(names.MAIN.get(), argv=["maxtext", *arguments])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
