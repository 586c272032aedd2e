"""Inference on two clusters: one reads the prompts (prefill), the other writes on (decode). The KV cache crosses by send.

hetccl run --cluster prefill=1x1 --cluster decode=1x1 -- python examples/prefill_decode.py
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_hetccl as hetccl


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model, and of what it is asked.

    Attributes:
      vocabulary, width, heads, layers: as usual.
      prompt: tokens of each prompt.
      new: tokens to write behind each prompt.
      rows: prompts.
    """

    vocabulary: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2
    prompt: int = 32
    new: int = 16
    rows: int = 2

    @property
    def cache(self) -> jax.ShapeDtypeStruct:
        """What crosses for each layer: keys and values `[2, rows, prompt - 1, heads, width / heads]`, float32."""
        shape = (2, self.rows, self.prompt - 1, self.heads, self.width // self.heads)
        return jax.ShapeDtypeStruct(shape, jnp.float32)


class Block(nnx.Module):
    """Causal self-attention and a perceptron, each behind a normalisation and beside a residual path."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        self.norm1, self.norm2 = nnx.RMSNorm(config.width, rngs=rngs), nnx.RMSNorm(config.width, rngs=rngs)
        self.qkv = nnx.Linear(config.width, 3 * config.width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array, cache: jax.Array | None, at: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Positions `at`, `at + 1`, … of each row; returns them and the keys and values, put into `cache` if there is one."""
        rows, length, width = x.shape
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)).reshape(rows, length, 3, self.heads, -1), 2, 0)
        fresh = jnp.stack([k, v])
        known = fresh if cache is None else jax.lax.dynamic_update_slice_in_dim(cache, fresh, at, axis=2)
        seen = jnp.arange(known.shape[2]) <= jnp.arange(length)[:, None] + at
        y = jax.nn.dot_product_attention(q, known[0], known[1], mask=seen[None, None])
        x = x + self.out(y.reshape(rows, length, width))
        return x + self.down(nnx.gelu(self.up(self.norm2(x)))), known


class Transformer(nnx.Module):
    """Tokens in, the most likely next token out."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.prompt + config.new, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.head = nnx.Linear(config.width, config.vocabulary, rngs=rngs)

    def embed(self, tokens: jax.Array, at: jax.Array | int) -> jax.Array:
        """`[rows, length]` tokens, of which the first stands at position `at`, to `[rows, length, width]`."""
        return self.tokens(tokens) + self.positions(at + jnp.arange(tokens.shape[1]))

    def step(self, token: jax.Array, cache: list[jax.Array], at: jax.Array | int) -> tuple[jax.Array, list[jax.Array]]:
        """One token of each row, `[rows]` int32, which stands at `at`: the next one, and the cache with it."""
        x, caches = self.embed(token[:, None], at), []
        for block, known in zip(self.blocks, cache, strict=True):
            x, known = block(x, known, at)
            caches.append(known)
        return jnp.argmax(self.head(x[:, -1]), axis=-1).astype(jnp.int32), caches


@functools.partial(nnx.jit, static_argnames="to")
def prefill(model: Transformer, prompts: jax.Array, to: str | None = None) -> list[jax.Array]:
    """Each layer's cache of the prompts without their last tokens. A layer's cache is sent as soon as it exists, while
    the next layers are computed."""
    x, cache = model.embed(prompts[:, :-1], 0), []
    for block in model.blocks:
        x, known = block(x, None, 0)
        if to is not None:
            hetccl.send(known, to=to, tag="cache")
        cache.append(known)
    return cache


@functools.partial(nnx.jit, static_argnames=("config", "source"))
def first_token(
    model: Transformer, prompts: jax.Array, cache: Any, config: Config, source: str | None = None
) -> tuple[jax.Array, list[jax.Array]]:
    """The first new token, from the prompts' last ones and the cache, which comes from `source` if that is a cluster."""
    if source is not None:
        cache = [hetccl.recv(config.cache, source=source, tag="cache") for _ in range(config.layers)]
    room = [(0, 0), (0, 0), (0, config.new + 1), (0, 0), (0, 0)]
    return model.step(prompts[:, -1], [jnp.pad(known, room) for known in cache], config.prompt - 1)


@functools.partial(nnx.jit, static_argnames="config")
def further_tokens(model: Transformer, token: jax.Array, cache: list[jax.Array], config: Config) -> jax.Array:
    """The new tokens, `[rows, new]` int32."""

    def write(carry: Any, at: jax.Array) -> tuple[Any, jax.Array]:
        token, cache = carry
        return model.step(token, cache, at), token

    places = jnp.arange(config.prompt, config.prompt + config.new)
    return jax.lax.scan(write, (token, cache), places)[1].T


def questions(config: Config, seed: int) -> jax.Array:
    """Prompts, `[rows, prompt]` int32; both clusters have them."""
    return jax.random.randint(jax.random.key(seed), (config.rows, config.prompt), 0, config.vocabulary)


def main() -> None:
    """Answers some prompts; the cluster `decode` compares with one device."""
    world, config = hetccl.initialize(), Config()
    model = Transformer(config, rngs=nnx.Rngs(0))  # the same weights in both clusters, without a message
    for request in range(3):
        prompts = questions(config, request)
        if world.clusters[world.cluster].name == "prefill":
            jax.block_until_ready(prefill(model, prompts, to="decode"))
            continue
        tokens = further_tokens(model, *first_token(model, prompts, None, config, source="prefill"), config)
        alone = further_tokens(model, *first_token(model, prompts, prefill(model, prompts), config), config)
        print(f"request {request}: {np.asarray(tokens)[0].tolist()}", flush=True)
        print(f"tokens equal those of one device: {np.array_equal(tokens, alone)}", flush=True)


if __name__ == "__main__":
    main()
