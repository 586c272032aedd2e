"""MaxText over two clusters against MaxText in one stock world, with the same global batch.

Runs where ``HETCCL_TEST_MAXTEXT_PYTHON`` names a Python that has MaxText (examples/maxtext/requirements.txt). The clusters have two
devices with FSDP, and one. Their rows have unequal numbers of tokens that count, so a mean over clusters instead of tokens
would show; so would clipping before the exchange, as the threshold is a tenth of the gradients' norm.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness.process import IN_PLACE, base_environment
from harness.pythons import maxtext_python

pytestmark = pytest.mark.skipif(
    not maxtext_python(), reason="HETCCL_TEST_MAXTEXT_PYTHON names no Python with MaxText (docs/maxtext.md)"
)

_ROOT = Path(__file__).resolve().parents[1]
_CLUSTERS = {"left": "left=1x2", "right": "right=1x1"}
_THRESHOLD = 0.1
_SETTINGS = (
    *(str(_ROOT / "examples" / "maxtext" / "two_clusters.yml"), "base_emb_dim=32", "base_num_decoder_layers=1"),
    *(
        "dtype=float32",
        f"gradient_clipping_threshold={_THRESHOLD}",
        "learning_rate_schedule_steps=4",
        "log_config=false",
    ),
)


class Run:
    """What a run left behind.

    Attributes:
        metrics: by cluster (``stock`` for a stock world), what it logged of each step and evaluation.
        states: by cluster, the whole training state at the end.
        text: what the processes printed.
    """

    def __init__(self, folder: Path, clusters: tuple[str, ...], text: str) -> None:
        self.metrics = {
            c: [json.loads(line) for line in (folder / f"{c}.jsonl").read_text().splitlines()] for c in clusters
        }
        self.states = {c: dict(np.load(folder / f"{c}.npz")) for c in clusters}
        self.text = text

    def of(self, cluster: str, key: str) -> list[float]:
        """A metric at each step (``learning/...``) or evaluation (``eval/...``)."""
        kind = "train" if key.startswith("learning/") else "eval"
        return [line[key] for line in self.metrics[cluster] if line["type"] == kind]


Start = Callable[..., Run]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Runs MaxText; equal calls share one run."""

    @functools.cache
    def run(kind: str, *options: str, output: Path | None = None) -> Run:
        folder = tmp_path_factory.mktemp(kind)
        output = output or folder
        environment = base_environment() | {
            "DECOUPLE_GCLOUD": "TRUE",
            "PYTHONPATH": ":".join(IN_PLACE),
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }
        program = [str(_ROOT / "tests" / "maxtext_program.py"), str(folder), *_SETTINGS]
        program += [f"base_output_directory={output}", f"run_name={kind}", *options]
        python = [maxtext_python(), "-P"]
        if kind == "linked":
            named = [word for cluster in _CLUSTERS.values() for word in ("--cluster", cluster)]
            command = [
                *python,
                "-m",
                "jax_hetccl.cli",
                "run",
                *named,
                "--time-limit",
                "400",
                "--",
                "python",
                "-P",
                *program,
            ]
        else:
            command = [*python, *program]
        done = subprocess.run(
            command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=450
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-6000:]
        return Run(folder, tuple(_CLUSTERS) if kind == "linked" else ("stock",), done.stdout)

    return run


# Four rows in the first cluster and two in the second are a batch of six.
_LINKED = ("steps=4", "per_device_batch_size=2", "checkpoint_period=2", "eval_interval=2", "eval_steps=1")
_STOCK = ("steps=4", "per_device_batch_size=6", "enable_checkpointing=false", "eval_interval=2", "eval_steps=1")


def assert_one_world(linked: Run, stock: Run) -> None:
    """The linked clusters computed what the stock world did, up to the order of sums in float32."""
    expected = functools.partial(stock.of, "stock")
    for cluster in _CLUSTERS:
        found = functools.partial(linked.of, cluster)
        assert found("learning/loss") == linked.of("left", "learning/loss"), "the reported loss is one number"
        assert found("learning/total_weights") == expected("learning/total_weights")
        for key in ("learning/loss", "learning/raw_grad_norm", "learning/grad_norm"):
            np.testing.assert_allclose(found(key), expected(key), rtol=5e-6, err_msg=f"{key} of {cluster}")
    assert min(expected("learning/raw_grad_norm")) > 4 * _THRESHOLD, "otherwise clipping would decide nothing"
    losses = expected("learning/loss")
    assert losses[-1] < losses[0] - 1, "otherwise nothing was learned"
    assert_equal_states(linked.states["left"], linked.states["right"])
    state = stock.states["stock"]
    assert set(state) == set(linked.states["left"])
    for name, array in linked.states["left"].items():
        # Adam divides by the root of the second moment: where a gradient is all rounding, so is the update, of 1e-2.
        np.testing.assert_allclose(array, state[name], rtol=1e-4, atol=2e-4, err_msg=name)


def assert_equal_states(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Bit for bit."""
    assert set(one) == set(other)
    different = [name for name in one if one[name].tobytes() != other[name].tobytes()]
    assert not different, f"differ: {different}"


def test_two_clusters_train_as_one_world(start: Start) -> None:
    linked, stock = start("linked", *_LINKED), start("stock", *_STOCK)
    assert_one_world(linked, stock)
    assert "state is copied" not in linked.text, "the clusters did not drift apart"
    evaluated = stock.of("stock", "eval/avg_loss")
    assert len(evaluated) == 2
    for cluster in _CLUSTERS:
        np.testing.assert_allclose(linked.of(cluster, "eval/avg_loss"), evaluated, rtol=5e-6)
        assert linked.of(cluster, "eval/total_weights") == stock.of("stock", "eval/total_weights")


def test_with_gradient_accumulation(start: Start, soak: bool) -> None:
    if not soak:
        pytest.skip("two more runs of MaxText; runs with --soak")
    options = ("steps=3", "enable_checkpointing=false", "gradient_accumulation_steps=2")
    linked = start("linked", *options, "per_device_batch_size=2")
    assert_one_world(linked, start("stock", *options, "per_device_batch_size=6"))


def test_one_cluster_accumulates_and_the_other_does_not(start: Start, soak: bool) -> None:
    if not soak:
        pytest.skip("two more runs of MaxText; runs with --soak")
    options = ("steps=3", "enable_checkpointing=false")
    linked = start(
        "linked",
        *options,
        "left:gradient_accumulation_steps=2",
        "left:per_device_batch_size=1",
        "right:per_device_batch_size=2",
    )
    assert_one_world(linked, start("stock", *options, "per_device_batch_size=6"))


def test_one_cluster_saves_and_all_resume_identically(start: Start, tmp_path: Path) -> None:
    """Steps 0 to 3 in one run, and step 3 after the checkpoint of step 2, end with the same bits."""
    straight = start("linked", *_LINKED)
    made = Path(
        next(m[1] for m in re.finditer(r"Finished saving checkpoint .* to `(.*)/checkpoints/2`", straight.text))
    )
    assert made.name == "linked"
    assert sorted(p.name for p in (made / "checkpoints").iterdir() if p.name.isdigit()) == ["0", "2", "3"]
    assert not (made.parent / "linked-right" / "checkpoints").exists(), "only the first cluster writes"
    shutil.copytree(made / "checkpoints" / "2", tmp_path / "linked" / "checkpoints" / "2")

    resumed = start("linked", *_LINKED, output=tmp_path)
    assert "[left/0]" in next(
        line for line in resumed.text.splitlines() if "restoring from this run's directory step 2" in line
    )
    for cluster in _CLUSTERS:
        assert resumed.of(cluster, "learning/loss") == straight.of(cluster, "learning/loss")[3:]
        assert_equal_states(resumed.states[cluster], straight.states[cluster])


def test_settings_that_differ_stop_every_process_alike(start: Start, soak: bool) -> None:
    if not soak:
        pytest.skip("one more run of MaxText; what is compared is in test_maxtext_settings.py")
    with pytest.raises(AssertionError) as caught:
        start("linked", "steps=3", "right:learning_rate=0.5", "enable_checkpointing=false")
    for cluster in _CLUSTERS:
        assert re.search(
            rf"\[{cluster}/0\] .*ConfigError: MaxText's settings must agree: learning_rate differs", str(caught.value)
        )
