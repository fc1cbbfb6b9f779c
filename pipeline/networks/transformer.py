"""A small vision transformer (Dosovitskiy et al., arXiv 2010.11929)."""

import jax
import jax.numpy as jnp
from flax import nnx

from gradtrail.core.config import Count, config


@config
class Network:
    """The keys of `train.own`, beside `file`."""

    patch: Count = 7  # height and width of a patch, in pixels; must divide those of the images
    width: Count = 64  # features of a patch; a multiple of `heads`
    heads: Count = 4
    blocks: Count = 2

    def build(self, shape: tuple[int, ...], num_classes: int, *, rngs: nnx.Rngs) -> nnx.Module:
        return Transformer(self, shape, num_classes, rngs=rngs)


class Transformer(nnx.Module):
    def __init__(self, config: Network, shape: tuple[int, ...], num_classes: int, *, rngs: nnx.Rngs):
        self.patch, num_channels = config.patch, shape[2] if len(shape) == 3 else 1
        num_patches = (shape[0] // config.patch) * (shape[1] // config.patch)
        self.embed = nnx.Linear(config.patch**2 * num_channels, config.width, rngs=rngs)
        self.position = nnx.Param(0.02 * rngs.params.normal((1, num_patches, config.width)))
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.blocks))
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, num_classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        count, height, width, size = *images.shape[:3], self.patch
        grid = images.reshape(count, height // size, size, width // size, -1).swapaxes(2, 3)
        tokens = self.embed(grid.reshape(count, self.position.shape[1], -1)) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(jnp.mean(self.norm(tokens), axis=1))


class Block(nnx.Module):
    def __init__(self, config: Network, *, rngs: nnx.Rngs):
        self.norms = nnx.List(nnx.LayerNorm(config.width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(config.heads, config.width, decode=False, rngs=rngs)
        self.hidden = nnx.Linear(config.width, 2 * config.width, rngs=rngs)
        self.out = nnx.Linear(2 * config.width, config.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        tokens = tokens + self.attention(self.norms[0](tokens))
        return tokens + self.out(nnx.gelu(self.hidden(self.norms[1](tokens))))
