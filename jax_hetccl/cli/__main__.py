"""`python -m jax_hetccl.cli`: the `hetccl` command without an installed script."""

import sys

from jax_hetccl.cli import main

sys.exit(main())
