"""Every name of MaxText that is replaced or called, and the check that it is what this package was tested with."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

from jax_hetccl._errors import ConfigError

# Where in a train step gradients leave their computation is no promise of MaxText, and a wrong place trains another
# model without an error. So only this version runs.
VERSION = "0.2.5"


@dataclasses.dataclass(frozen=True)
class Name:
    """A function of MaxText.

    Attributes:
      module: where it is looked up when MaxText calls it.
      path: its name there, with the class for a method.
      parameters: the names of its parameters.
    """

    module: str
    path: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.path}({', '.join(self.parameters)})"

    def owner(self, load: Callable[[str], Any] = importlib.import_module) -> Any:
        """The module or class that has it."""
        return functools.reduce(getattr, self.path.split(".")[:-1], load(self.module))

    def get(self) -> Any:
        """The function."""
        return getattr(self.owner(), self.path.split(".")[-1])

    def replace(self, make: Callable[[Any], Any]) -> None:
        """Puts ``make(the function)`` in its place."""
        setattr(self.owner(), self.path.split(".")[-1], functools.wraps(self.get())(make(self.get())))


_TRAIN = "maxtext.trainers.pre_train.train"

MAIN = Name(_TRAIN, "main", ("argv",))
CONFIG = Name("maxtext.configs.pyconfig", "initialize", ("argv", "config_class", "kwargs"))
LOSS = Name(_TRAIN, "loss_fn", ("model", "config", "data", "dropout_rng", "params", "sparsity_state", "is_train"))
ACCUMULATION = Name(
    _TRAIN,
    "gradient_accumulation_loss_and_grad",
    ("_loss_fn", "config", "model", "params", "params_shardings", "data", "dropout_rng"),
)
CLIPPING = Name("maxtext.utils.maxtext_utils", "apply_gradient_clipping", ("raw_grads", "state", "clipping_threshold"))
SETUP = Name("maxtext.utils.train_utils", "setup_train_loop", ("config", "recorder", "devices"))
MANAGER = Name("maxtext.utils.train_utils", "create_checkpoint_manager", ("config", "mesh", "init_state_fn"))
SAVE = Name(
    "maxtext.common.checkpointing",
    "maybe_save_checkpoint",
    ("checkpoint_manager", "state", "config", "data_iterator", "step"),
)
SYNTHETIC = Name(
    "maxtext.input_pipeline.synthetic_data_processing", "SyntheticDataIterator.__init__", ("self", "config", "mesh")
)
ITERATOR = Name(
    "maxtext.input_pipeline.input_pipeline_interface",
    "create_process_specific_iterator",
    ("config", "mesh", "process_indices", "input_iterator", "is_training"),
)

ALL = (MAIN, CONFIG, LOSS, ACCUMULATION, CLIPPING, SETUP, MANAGER, SAVE, SYNTHETIC, ITERATOR)


def check(
    version: Callable[[str], str] = importlib.metadata.version,
    load: Callable[[str], Any] = importlib.import_module,
) -> None:
    """Checks MaxText before anything of it runs. It is imported, which starts no JAX backend.

    Args:
      version: gives the version of an installed distribution.
      load: imports a module.

    Raises:
      ConfigError: MaxText is not installed, or another version, or its names are others; lists all that differ.
    """
    try:
        found = version("maxtext")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"maxtext {VERSION} is not installed in this Python (3.12 or newer is needed). "
            "examples/maxtext/requirements.txt lists what a run needs: pip install -r examples/maxtext/requirements.txt"
        ) from None
    if found != VERSION:
        raise ConfigError(
            f"maxtext {found} is installed, but jax_hetccl hooks into maxtext {VERSION} and was tested with no other: "
            f"another version may compute gradients elsewhere. Install it with: pip install maxtext=={VERSION}"
        )
    problems = [problem for name in ALL if (problem := _problem(name, load))]
    if problems:
        raise ConfigError(
            f"maxtext says that it is {VERSION}, but these names are not as they are there: " + "; ".join(problems)
        )


def _problem(name: Name, load: Callable[[str], Any]) -> str | None:
    try:
        function = getattr(name.owner(load), name.path.split(".")[-1])
    except ImportError as error:
        return f"expected {name}, but importing {name.module} fails: {error}"
    except AttributeError:
        return f"expected {name}, but there is none"
    parameters = tuple(inspect.signature(function).parameters)
    if parameters != name.parameters:
        return f"expected {name}, but it takes ({', '.join(parameters)})"
    return None
