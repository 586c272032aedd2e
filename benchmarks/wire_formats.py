"""Training with narrow formats between two clusters, and with DiLoCo, all from the same parameters on the same batches.

    hetccl run --cluster left=1x1@cpu --cluster right=1x1@cpu -- python benchmarks/wire_formats.py --out benchmarks/results

The model and text of `hetccl demo` (115,873 parameters; Adam; 8 rows of 64 characters for each cluster and step). Every
run begins with the same parameters and sees the same batches. Reported: the loss on 64 held-out rows along the
way (of the anchor, for DiLoCo), and the bytes that the first cluster sent for each step, counted by the engine.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax
from flax import nnx

import jax_hetccl as hetccl
from jax_hetccl.demo import corpus
from jax_hetccl.demo.model import CharTransformer, ModelConfig, next_character_loss

ROWS, LENGTH, RATE, LOOKS = 8, 64, 3e-3, 20
FORMATS = ("bfloat16", "float8_e4m3fn", "int8")
OUTER = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
Initial = Callable[[Any], Any]
Update = Callable[[Any, Any, Any], tuple[Any, Any]]
Shared = Callable[[Any, Any], Any]


def synchronized(wire_dtype: str | None, feedback: bool) -> tuple[Initial, Update, Shared]:
    """Every gradient crosses."""
    link = hetccl.optax.synchronize(wire_dtype=wire_dtype, error_feedback=feedback, name=f"{wire_dtype} {feedback}")
    optimizer = optax.chain(link, optax.adam(RATE))

    def update(parameters: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    return optimizer.init, update, lambda parameters, state: parameters


def now_and_then(name: str, **how: Any) -> tuple[Initial, Update, Shared]:
    """DiLoCo."""
    inner = optax.adam(RATE)
    outer = hetccl.optax.diloco(optax.sgd(**OUTER), name=name, **how)

    def init(parameters: Any) -> Any:
        return inner.init(parameters), outer.init(parameters)

    def update(parameters: Any, state: Any, gradients: Any) -> tuple[Any, Any]:
        updates, first = inner.update(gradients, state[0], parameters)
        parameters, second = outer.apply_updates(parameters, updates, state[1])
        return parameters, (first, second)

    return init, update, lambda parameters, state: state[1].anchor


def runs() -> dict[str, tuple[Initial, Update, Shared]]:
    """What is compared, by name."""
    found = {"float32": synchronized(None, False)}
    for form in FORMATS:
        found[form] = synchronized(form, True)
        found[f"{form}, no feedback"] = synchronized(form, False)
    for text, how in (
        ("diloco, every 10", dict(every=10)),
        ("diloco, every 10, overlap", dict(every=10, overlap=True)),
        ("diloco, every 10, overlap, 5 fragments", dict(every=10, overlap=True, fragments=5)),
        ("diloco, every 10, int8", dict(every=10, wire_dtype="int8")),
        ("diloco, every 10, int8, no feedback", dict(every=10, wire_dtype="int8", error_feedback=False)),
    ):
        found[text] = now_and_then(text, **how)
    return found


def main() -> None:
    """Trains in every way; the first process writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs from other parameters and batches; medians are reported"
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for wire-formats.json")
    given = parser.parse_args()
    world = hetccl.initialize()
    report: dict[str, Any] = {}
    for seed in range(given.seeds):
        text = corpus.make(given.steps + 8, ROWS * world.size, LENGTH, seed)
        graph, first = nnx.split(CharTransformer(ModelConfig(corpus.VOCABULARY, LENGTH), rngs=nnx.Rngs(seed)))
        held_out = jax.numpy.concatenate([text.rows(given.steps + i, 0, ROWS) for i in range(8)])
        mine = slice(world.cluster * ROWS, (world.cluster + 1) * ROWS)

        def loss_of(parameters: Any, rows: Any) -> jax.Array:
            return next_character_loss(nnx.merge(graph, parameters), rows)

        evaluate = jax.jit(loss_of)
        for name, (init, update, shared) in runs().items():

            @partial(jax.jit, donate_argnums=(0, 1))
            def step(parameters: Any, state: Any, rows: Any) -> Any:
                return update(parameters, state, jax.grad(loss_of)(parameters, rows))

            parameters = hetccl.broadcast(jax.tree.map(jax.numpy.copy, first))
            state, losses = jax.jit(init)(parameters), {}
            before = world.engine.stats()["bytes_sent"]
            for i in range(given.steps):
                parameters, state = step(parameters, state, text.rows(i, mine.start, mine.stop))
                if (i + 1) % LOOKS == 0:
                    losses[i + 1] = round(float(evaluate(shared(parameters, state), held_out)), 5)
            jax.block_until_ready(parameters)
            hetccl.check_replicas(shared(parameters, state))
            sent = (world.engine.stats()["bytes_sent"] - before) / given.steps
            entry = report.setdefault(name, {"bytes_per_step": sent, "losses": []})
            entry["losses"].append(losses)
            if world.cluster == 0:
                print(
                    f"seed {seed} {name:40} loss {losses[max(losses)]:.4f}, {sent:9.0f} bytes a step",
                    flush=True,
                )
    if world.cluster == 0:
        for entry in report.values():
            entry["end"] = statistics.median(losses[max(losses)] for losses in entry["losses"])
        facts = {"jax": jax.__version__, "machine": platform.machine(), "steps": given.steps, "seeds": given.seeds}
        command = (
            "hetccl run --cluster left=1x1@cpu --cluster right=1x1@cpu -- python benchmarks/wire_formats.py "
            f"--steps {given.steps} --seeds {given.seeds} --out benchmarks/results"
        )
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "wire-formats.json").write_text(
            json.dumps({"command": command, **facts, "runs": report}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
