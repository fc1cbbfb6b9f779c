"""The section `audit` of `params.yaml`: how many networks an audit trains, and how."""

import dataclasses
from dataclasses import dataclass

from gradtrail.core.common.validation import AT_LEAST_ONE, POSITIVE_SHARE, SEED, check_fields
from gradtrail.core.config import MAX_GALLERY
from gradtrail.core.data import AugmentationConfig
from gradtrail.core.nn.arithmetic import Precision
from gradtrail.core.nn.cnn import CNN
from gradtrail.core.train.config import VARIED, TrainConfig
from gradtrail.core.train.loss_scaling import LossScalingConfig
from gradtrail.core.train.optimizers import AdamW
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.train.schedules import OneCycle


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """An audit of the labels: `folds` times `rounds` networks for each of three sets of labels."""

    seed: int  # seed of the folds, the trainings and the planted noise
    quick: bool  # True if one round is made instead of `rounds`, for a first look
    folds: int  # number of parts of the training split; a network is trained on all but one and evaluated on that one
    rounds: int  # number of times the split is cut into folds, which is the number of logits per training example
    epochs: int  # passes of each training
    batch_size: int  # examples per optimizer step
    learning_rate: float  # peak of the one-cycle schedule, with AdamW
    weight_decay: float  # decay per step, times the learning rate
    channels: tuple[int, ...]  # channels of each stack of convolutions
    hidden: tuple[int, ...]  # width of each hidden dense layer
    precision: Precision  # precision of matrix products and convolutions in training
    noise_rate: float  # share of the training labels that are planted wrong, to choose and to test the score
    num_suspects: int  # images in the gallery of each split

    def __post_init__(self) -> None:
        check_fields(
            self,
            seed=SEED,
            folds={"at_least": 2, "at_most": 100},
            rounds={"at_least": 1, "at_most": 100},
            epochs=AT_LEAST_ONE,
            noise_rate=POSITIVE_SHARE,
            num_suspects={"at_least": 1, "at_most": MAX_GALLERY},
        )
        self.train_config()  # checks the rest

    @property
    def effective(self) -> "AuditConfig":
        """This config, or its `quick` form."""
        return dataclasses.replace(self, rounds=1, quick=False) if self.quick else self

    @property
    def num_networks(self) -> int:
        """Networks for each set of labels."""
        return self.folds * self.rounds

    def train_config(self) -> TrainConfig:
        """Return the training of one network: a small CNN, with AdamW and the one-cycle schedule."""
        return TrainConfig(
            seed=self.seed,
            members=1,
            vary=VARIED,
            epochs=self.epochs,
            batch_size=self.batch_size,
            accumulation_steps=1,
            shards=1,
            reduction="ordered",
            model=CNN(
                channels=self.channels,
                convolutions=1,
                kernel_size=3,
                norm="none",
                groups=1,
                hidden=self.hidden,
                activation="relu",
                dropout=0.0,
            ),
            features="none",
            precision=self.precision,
            loss_scaling=LossScalingConfig(
                initial=2.0**15, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, minimum=1.0
            ),
            remat=False,
            optimizer=AdamW(
                learning_rate=self.learning_rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=self.weight_decay
            ),
            schedule=OneCycle(warmup_fraction=0.3, div_factor=25.0, final_div_factor=10_000.0),
            clip_norm=1.0,
            average_decay=None,
            label_smoothing=0.0,
            augmentation=AugmentationConfig(shift=0.0, rotation=0.0, scale=0.0, shear=0.0, cutout=0),
            privacy=NOT_PRIVATE,
            keep_epochs=(),
            patience=None,
        )
