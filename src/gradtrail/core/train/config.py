"""The section `train` of `params.yaml`.

The fields `model`, `optimizer`, `schedule` and `loss` hold the config of the kind that is chosen. `params.yaml` has the
blocks of all kinds beside the name of the chosen one, so that one override switches the kind.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from gradtrail.core.config import Bounds, ConfigError, Count, CountOrZero, Positive, PositiveShare, Seed, config
from gradtrail.core.data import Split, channel_statistics
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.losses import Loss, for_labels
from gradtrail.core.nn.models import ModelConfig, Network, Normalization
from gradtrail.core.train.augmentation import AugmentationConfig
from gradtrail.core.train.changes import ChangesConfig
from gradtrail.core.train.loss_scaling import LossScalingConfig
from gradtrail.core.train.optimizers import Optimizer
from gradtrail.core.train.privacy import PrivacyConfig
from gradtrail.core.train.schedules import Schedule
from gradtrail.core.train.start import ReadStart, StartConfig

Varied = Literal["initialization", "order", "augmentation", "dropout"]  # purposes, as in `MemberSeeds`
VARIED: tuple[Varied, ...] = get_args(Varied)


@dataclass(frozen=True, kw_only=True)
class MemberSeeds:
    """Seeds of the random numbers of one network, by purpose; private trainings have `noise`."""

    initialization: int
    order: int
    augmentation: int
    dropout: int
    noise: int | None = None

    @classmethod
    def from_one(cls, seed: int) -> "MemberSeeds":
        """Return one seed for every purpose but noise."""
        return cls(**dict.fromkeys(VARIED, seed))


@config
class TrainConfig:
    """A training: network, optimizer, schedule and everything else that determines its result."""

    seed: Seed  # seed of the initial weights, the order of the examples, dropout and augmentation
    members: Annotated[int, Bounds(at_least=1, at_most=256)]  # networks, with the seeds `seed`, `seed + 1` and so on
    vary: tuple[Varied, ...]  # purposes that use the seed of the member; all others use `seed` in every member
    epochs: Annotated[int, Bounds(at_least=1, at_most=100_000)]  # JAX counts the steps in int32
    batch_size: Count  # most examples per optimizer step; the last batch of an epoch may be smaller, or be the only one
    # parts of each batch, computed one after the other: the gradient is that of the whole batch, the memory that of one
    accumulation_steps: Count
    # devices that each batch is split over; their sums are added up. Another number changes rounding alone.
    shards: Annotated[int, Bounds(at_least=1, at_most=1024)]
    # order of the sums over shards: that of the shards, with the same bits on any number of processes, or that of
    # XLA, which is faster within one process
    reduction: Literal["ordered", "fastest"]
    model: Network
    start: StartConfig
    precision: Precision
    loss_scaling: LossScalingConfig  # for `precision: float16` only
    # means and standard deviations of the channels, in 0..1, by which images are standardized; `channels` for those of
    # the training split, which `for_split` fills in; None for pixels in 0..1
    normalization: Literal["channels"] | Normalization | None
    remat: bool  # True if the backward pass recomputes activations instead of storing them
    optimizer: Optimizer
    schedule: Schedule
    clip_norm: Positive | None  # global norm to which larger gradients are scaled down; None for no clipping
    # decay of the moving average of the weights, which is then evaluated and kept instead of them; None for none
    average_decay: PositiveShare | None
    loss: Loss
    augmentation: AugmentationConfig
    changes: ChangesConfig
    privacy: PrivacyConfig
    # epochs whose weights are kept for analyses; 0 is before training, later ones than the last are ignored
    keep_epochs: tuple[CountOrZero, ...]
    patience: Count | None  # epochs without a better validation accuracy that end the training; None for no limit

    def check(self) -> None:
        if (most := 2**32 - self.seed) < self.members:
            raise ValueError(f"members must be at most {most:,} with seed {self.seed:,}, got {self.members:,}")
        if not self.vary or len({*self.vary}) < len(self.vary):
            raise ValueError(f"vary must name at least one of {', '.join(VARIED)}, each once, got {[*self.vary]}")
        if self.members > 1 and not self._random.intersection(self.vary):
            raise ValueError(
                f"vary must name something that is random, {' or '.join(sorted(self._random))}, "
                f"got {[*self.vary]}: all members would be the same"
            )
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"accumulation_steps must divide batch_size {self.batch_size}, got {self.accumulation_steps}"
            )
        if (part := self.batch_size // self.accumulation_steps) % self.shards:
            name = "batch_size" if self.accumulation_steps == 1 else "batch_size / accumulation_steps"
            raise ValueError(f"shards must divide {name}, {part}, got {self.shards}")
        if self.augmentation.mixup and self.changes.enabled:
            raise ValueError(
                f"augmentation.mixup must be 0 with changes of the training split, got {self.augmentation.mixup}: a "
                f"removed example would stay in other images"
            )
        if self.privacy.enabled:
            self._check_privacy()

    @property
    def seeds(self) -> range:
        """The seeds of the members."""
        return range(self.seed, self.seed + self.members)

    def seeds_of(self, member: int) -> MemberSeeds:
        """Return the seeds of the member with this seed.

        Batches and noise of private members never share a seed: accounting assumes that they are independent.
        """
        seeds = MemberSeeds(**{name: member if name in self.vary else self.seed for name in VARIED})
        return dataclasses.replace(seeds, order=member, noise=member) if self.privacy.enabled else seeds

    def model_config(self, image_shape: tuple[int, ...], num_classes: int) -> ModelConfig:
        """Return the config of the network for a data set's image shape and number of classes."""
        return ModelConfig(
            network=self.model,
            precision=self.precision,
            image_shape=image_shape,
            num_classes=num_classes,
            normalization=None if self.normalization == "channels" else self.normalization,
        )

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, so that small cotangents do not underflow."""
        return self.precision == "float16"

    @property
    def measures_parts(self) -> bool:
        """Whether the norms of a batch's parts are recorded; if private, they would reveal single examples."""
        return self.accumulation_steps > 1 and not self.privacy.enabled

    def _check_privacy(self) -> None:
        """Raise ValueError for settings that a private training does not support."""
        if self.changes.enabled:
            raise ValueError("privacy.enabled must be false with changes of the training split, got true")
        if self.normalization == "channels":
            raise ValueError(
                "normalization must be empty or numbers with privacy.enabled, got channels: no noise covers statistics "
                "of the training split"
            )
        if self.remat:
            raise ValueError(
                "remat must be false with privacy.enabled, whose backward pass holds a few examples at a time, got true"
            )
        if self.precision == "float16":
            raise ValueError(
                "precision must be float32 or bfloat16 with privacy.enabled, got float16: what is done about the "
                "overflow of a gradient would reveal its example"
            )
        if self.augmentation.mixup:
            raise ValueError(
                f"augmentation.mixup must be 0 with privacy.enabled, got {self.augmentation.mixup}: an example would "
                f"change the clipped gradients of other examples"
            )
        draws = self.augmentation.enabled or "dropout" in self._random
        if (copies := self.privacy.augmentation_multiplicity) > 1 and not draws:
            raise ValueError(
                f"privacy.augmentation_multiplicity must be 1 without augmentation or dropout, got {copies}: all would "
                f"be the same"
            )

    @property
    def _random(self) -> set[Varied]:
        """Purposes that draw random numbers under these params."""
        purposes: set[Varied] = {"order"}
        purposes |= set() if isinstance(self.start, ReadStart) and not self.start.drawn else {"initialization"}
        purposes |= {"augmentation"} if self.augmentation.enabled else set()
        return purposes | ({"dropout"} if self.model.dropout else set())


def for_split(config: TrainConfig, split: Split, num_classes: int) -> TrainConfig:
    """Return the config with numbers for what follows from the training split: weights of classes and normalization.

    Raises:
        ConfigError: the config has numbers for another number of classes or channels; one line.
    """
    loss, normalization = for_labels(config.loss, split.labels, num_classes), config.normalization
    if normalization == "channels":
        normalization = channel_statistics(split.images)
    num_channels = split.images.shape[3] if split.images.ndim == 4 else 1
    if normalization is not None and any(len(numbers) != num_channels for numbers in normalization):
        found = " and ".join(str(len(numbers)) for numbers in normalization)
        raise ConfigError(
            f"train.normalization must have a mean and a standard deviation for each of {num_channels} channels, "
            f"got {found} numbers"
        )
    return dataclasses.replace(config, loss=loss, normalization=normalization)
