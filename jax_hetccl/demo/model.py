"""A small decoder-only transformer over characters, in Flax NNX. Knows nothing of clusters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        vocabulary: distinct characters.
        length: longest context, in characters.
        width: features of a position; a multiple of `heads`.
        heads: attention heads.
        layers: transformer blocks.
    """

    vocabulary: int
    length: int = 64
    width: int = 64
    heads: int = 4
    layers: int = 2


class Attention(nnx.Module):
    """Causal self-attention over `[batch, length, width]`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        # No biases: a key's bias has no effect on the result, so its gradient is pure rounding noise.
        self.qkv = nnx.Linear(config.width, 3 * config.width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(config.width, config.width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Each position attends to itself and the ones before it."""
        batch, length, width = x.shape
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads), 2, 0)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, width))


class Block(nnx.Module):
    """Attention and a two-layer perceptron, each behind a normalisation and beside a residual path."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm2 = nnx.RMSNorm(config.width, rngs=rngs)
        self.up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Adds both parts to `x`."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class CharTransformer(nnx.Module):
    """Characters in, for each position the logits of the next character out.

    Example:
        >>> model = CharTransformer(ModelConfig(vocabulary=97), rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((2, 64), jnp.int32)).shape
        (2, 64, 97)
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.characters = nnx.Embed(config.vocabulary, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.length, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, config.vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits `[batch, length, vocabulary]` for `tokens` `[batch, length]`."""
        x = self.characters(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_character_loss(model: CharTransformer, rows: jax.Array) -> jax.Array:
    """Mean cross entropy, in nats, of each character of `rows` given the ones before it in its row.

    Args:
        model: gives the logits.
        rows: `[batch, length + 1]`.
    """
    logits = jax.nn.log_softmax(model(rows[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(logits, rows[:, 1:, None], axis=-1))
