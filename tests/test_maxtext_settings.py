"""What links clusters to MaxText, as far as it goes without MaxText: names, arguments, refusals, places of processes."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import subprocess
import sys
import types
from typing import Any

import pytest

from harness.process import IN_PLACE
from jax_hetccl import ConfigError
from jax_hetccl.integrations.maxtext import names, settings
from jax_hetccl.integrations.maxtext.data import among_all, synthetic


def twin(**changes: Any) -> dict[str, Any]:
    """Modules with the names and parameters of MaxText that the check looks for, and nothing behind them.

    Args:
        **changes: other parameters of a function, by its name; None leaves it out.
    """
    modules: dict[str, Any] = {}
    for name in names.ALL:
        *owners, last = name.path.split(".")
        parameters = changes.get(last, name.parameters)
        owner = modules.setdefault(name.module, types.SimpleNamespace())
        for part in owners:
            owner = owner.__dict__.setdefault(part, types.SimpleNamespace())
        if parameters is not None:
            scope: dict[str, Any] = {}
            exec(f"def {last}({', '.join(parameters)}): pass", scope)
            setattr(owner, last, scope[last])
    return modules


def check(modules: dict[str, Any], version: str = names.VERSION) -> None:
    def load(module: str) -> Any:
        if module not in modules:
            raise ModuleNotFoundError(f"No module named {module!r}")
        return modules[module]

    names.check(lambda _: version, load)


def test_the_tested_version_passes() -> None:
    check(twin())


def test_another_version_is_refused_without_looking_further() -> None:
    with pytest.raises(
        ConfigError, match=r"maxtext 0\.2\.6 is installed.*maxtext 0\.2\.5.*pip install maxtext==0\.2\.5"
    ):
        check({}, "0.2.6")


def test_without_maxtext() -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    with pytest.raises(ConfigError, match=r"not installed.*requirements\.txt"):
        names.check(version)


def test_one_error_names_everything_that_is_different() -> None:
    modules = twin(loss_fn=("model", "batch"), apply_gradient_clipping=None)
    del modules["maxtext.configs.pyconfig"]
    with pytest.raises(ConfigError) as caught:
        check(modules)
    text = str(caught.value)
    assert (
        "train.loss_fn(model, config, data, dropout_rng, params, sparsity_state, is_train), but it takes (model, batch)"
        in text
    )
    assert "apply_gradient_clipping(raw_grads, state, clipping_threshold), but there is none" in text
    assert "importing maxtext.configs.pyconfig fails: No module named 'maxtext.configs.pyconfig'" in text


def test_arguments_for_one_cluster() -> None:
    argv = ["base.yml", "right:hardware=gpu", "hardware=cpu", "left:per_device_batch_size=4", "data=gs://bucket/a=b"]
    needed = ["skip_jax_distributed_system=true", "remove_size_one_mesh_axis_from_type=false"]
    of = functools.partial(settings.arguments, argv, clusters=["left", "right"])
    assert of("left") == ["base.yml", "hardware=cpu", "data=gs://bucket/a=b", "per_device_batch_size=4", *needed]
    assert of("right") == ["base.yml", "data=gs://bucket/a=b", "hardware=gpu", *needed]


def test_arguments_for_no_cluster() -> None:
    with pytest.raises(ConfigError, match="there is no cluster 'amd'; NAME:key=value is for one of left, right"):
        settings.arguments(["base.yml", "amd:steps=3"], "left", ["left", "right"])


def test_refusals_give_reasons() -> None:
    usual = {"quantization": "", "moe_dropless_fallback": None, "dataset_type": "grain", "enable_checkpointing": False}
    assert settings.refusals(usual) == []
    wrong = {
        "quantization": "fp8",
        "use_qk_clip": True,
        "enable_checkpointing": True,
        "lora": {"enable_lora": True},
        "eval_interval": 2,
        "eval_steps": -1,
    }
    found = settings.refusals({**usual, **wrong})
    expected = [
        "use_qk_clip=True",
        "quantization='fp8'",
        "dataset_type='grain' with enable_checkpointing",
        "eval_steps=-1 with eval_interval",
        "lora.enable_lora=True",
    ]
    assert [text.split(":")[0] for text in found] == expected


def test_settings_that_must_agree() -> None:
    same = {key: "1" for key in settings.EQUAL}
    assert settings.difference({"left/0": same, "right/0": dict(same)}) is None
    assert (
        settings.difference({"left/0": same, "right/0": {**same, "steps": "2"}})
        == "steps differs: 1 in left/0, 2 in right/0"
    )


def test_places_of_processes_are_disjoint() -> None:
    sizes, places = [2, 1, 3], []
    for cluster, size in enumerate(sizes):
        own = list(range(size))
        found = among_all(own, sum(sizes[:cluster]), sum(sizes[cluster + 1 :]))
        assert len(found) == sum(sizes)
        places += [found.index(process) for process in own]
    assert places == list(range(sum(sizes)))


def test_synthetic_rows_are_those_of_one_world() -> None:
    def original(self: Any, config: Any, mesh: Any) -> None:
        self.config, self.data = config, (list(range(config.global_batch_size_to_load)), [config.other])

    taken = []
    for first, rows in ((0, 4), (4, 1), (5, 3)):
        made = types.SimpleNamespace()
        config = types.SimpleNamespace(global_batch_size_to_load=rows, other="kept")
        synthetic(original, lambda first=first: (first, 8))(made, config, None)
        taken += made.data[0]
        assert made.config is config  # what the step is traced with
    assert taken == list(range(8))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HETCCL_")}
    environment["PYTHONPATH"] = os.pathsep.join(IN_PLACE)
    command = [sys.executable, "-P", "-m", "jax_hetccl.integrations.maxtext", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, check=False, text=True, timeout=60)


def test_usage() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m jax_hetccl.integrations.maxtext CONFIG.yml")
    assert run().returncode == 2


@pytest.mark.skipif(
    any(d.name == "maxtext" for d in importlib.metadata.distributions()), reason="MaxText is installed in this Python"
)
def test_command_without_maxtext_is_one_line() -> None:
    done = run("base.yml")
    assert done.returncode == 2
    assert done.stderr.startswith("jax_hetccl.integrations.maxtext: maxtext 0.2.5 is not installed")
    assert len(done.stderr.splitlines()) == 1
