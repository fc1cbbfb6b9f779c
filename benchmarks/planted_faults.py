"""Faults that private trainings have had, planted into ours: what `benchmarks/privacy_audit.py` must find."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from gradtrail.core.train import dp_sgd, step
from gradtrail.core.train.optimizers import squared_norm

PARTS = 8  # that a batch is taken to be worked in


def _noise_of_a_part(grads: Any, config: Any, mechanism: Any, *, key: Any) -> Any:
    """Add noise that is divided by the size of a batch of as many parts, where the sum is divided by that of one."""
    weaker = dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier / PARTS)
    return dp_sgd.noised_mean(grads, config, weaker, key=key)


def _clipped_mean(config: Any, model: Any, mechanism: Any) -> Any:
    """Clip the mean gradient of the batch in place of each example's."""
    clip = config.privacy.example_clip_norm
    privacy = dataclasses.replace(config.privacy, example_clip_norm=1e9)
    gradient = dp_sgd.make_private_gradient(dataclasses.replace(config, privacy=privacy), model, mechanism)

    def clipped(shared: Any, rows: Any) -> Any:
        (grads, metrics), record = gradient(shared, rows)
        factor = jnp.minimum(1.0, config.batch_size * clip / jnp.sqrt(squared_norm(grads)))
        return (jax.tree.map(lambda leaf: factor * leaf, grads), metrics), record

    return clipped


FAULTS = {  # what it is → (module, function, its faulty form)
    "noise scaled by the wrong batch size": (step, "noised_mean", _noise_of_a_part),
    "the mean clipped in place of each example": (step, "make_private_gradient", _clipped_mean),
}


@contextlib.contextmanager
def planted(fault: str) -> Iterator[None]:
    """Replace a function of the engine while trainings are compiled."""
    module, name, faulty = FAULTS[fault]
    with mock.patch.object(module, name, faulty):
        yield
