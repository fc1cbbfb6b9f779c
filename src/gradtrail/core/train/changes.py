"""The section `train.changes` of `params.yaml`: the same training without some examples, or with other labels.

The examples stay in their batches with other weights, so that order, random numbers and number of steps stay the same.
"""

import numpy as np
from jaxtyping import Float, Int

from gradtrail.core.config import ConfigError, Seed, Share, config
from gradtrail.core.data import OMITTED, REMOVED


@config
class ChangesConfig:
    """Changes of the training split."""

    omit: tuple[int, ...]  # example_id of each example that is removed
    omit_fraction: Share  # share of the training examples that is removed as well, drawn at random
    omit_seed: Seed  # seed of this draw alone
    relabel: tuple[tuple[int, int], ...]  # example_id and new label of other examples

    @property
    def enabled(self) -> bool:
        """Whether any change is configured."""
        return bool(self.omit or self.omit_fraction or self.relabel)


NO_CHANGES = ChangesConfig(omit=(), omit_fraction=0.0, omit_seed=0, relabel=())


def changed_labels(
    config: ChangesConfig,
    labels: Int[np.ndarray, " examples"],
    example_id: Int[np.ndarray, " examples"],
    num_classes: int,
) -> Int[np.ndarray, " examples"]:
    """Return the label of each training example after the changes, int32; `REMOVED` for one that is removed.

    Raises:
        ConfigError: an example is not in the split, a label is not a class, or no example is left; one line.
    """
    changed = np.array(labels, np.int32)
    rows = {int(name): row for row, name in enumerate(example_id)}

    def row_of(key: str, name: int) -> int:
        if name not in rows:
            raise ConfigError(
                f"train.changes.{key}: no example {name} in the training split, which has {len(rows):,} "
                f"of {example_id.min()} to {example_id.max()}"
            )
        return rows[name]

    # Other labels, then removals: a removed example stays removed
    for name, label in config.relabel:
        row = row_of("relabel", name)
        if not 0 <= label < num_classes:
            raise ConfigError(
                f"train.changes.relabel: label must be from 0 to {num_classes - 1}, got {label} for example {name}"
            )
        changed[row] = label
    changed[[row_of("omit", name) for name in config.omit]] = REMOVED
    order = np.random.default_rng((config.omit_seed, OMITTED)).permutation(len(labels))
    changed[order[: round(config.omit_fraction * len(labels))]] = REMOVED
    if len(labels) and (changed == REMOVED).all():
        raise ConfigError(f"train.changes must leave a training example, got all {len(labels):,} omitted")
    return changed


def weight_changes(
    labels: Int[np.ndarray, " examples"], changed: Int[np.ndarray, " examples"], num_classes: int
) -> Float[np.ndarray, "examples classes"]:
    """Return the changes of the weights, float32, as in `gradient.Examples`, by which `labels` become `changed`."""
    rows, stays = np.arange(len(labels)), changed != REMOVED
    weights = np.zeros((len(labels), num_classes), np.float32)
    weights[rows, labels] = -1
    weights[rows[stays], changed[stays]] += 1
    return weights
