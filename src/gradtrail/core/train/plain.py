"""A training without anything optional, from which others are made by `dataclasses.replace`."""

from gradtrail.core.nn.losses import CROSS_ENTROPY
from gradtrail.core.nn.mlp import Linear
from gradtrail.core.train.augmentation import NO_AUGMENTATION
from gradtrail.core.train.changes import NO_CHANGES
from gradtrail.core.train.config import VARIED, TrainConfig
from gradtrail.core.train.loss_scaling import LossScalingConfig
from gradtrail.core.train.optimizers import SGD
from gradtrail.core.train.privacy import NOT_PRIVATE
from gradtrail.core.train.schedules import Constant
from gradtrail.core.train.start import NO_START

# Softmax regression by plain SGD
PLAIN = TrainConfig(
    seed=0,
    members=1,
    vary=VARIED,
    epochs=1,
    batch_size=1,
    accumulation_steps=1,
    shards=1,
    reduction="ordered",
    model=Linear(),
    start=NO_START,
    precision="float32",
    loss_scaling=LossScalingConfig(
        initial=2.0**15, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, minimum=1.0
    ),
    normalization=None,
    remat=False,
    optimizer=SGD(learning_rate=0.1, momentum=0.0, nesterov=False),
    schedule=Constant(warmup_fraction=0.0),
    clip_norm=None,
    average_decay=None,
    loss=CROSS_ENTROPY,
    augmentation=NO_AUGMENTATION,
    changes=NO_CHANGES,
    privacy=NOT_PRIVATE,
    keep_epochs=(),
    patience=None,
)
