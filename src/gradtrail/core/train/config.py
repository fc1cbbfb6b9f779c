"""The section `train` of `params.yaml`. Kinds stand side by side, so that one override switches each."""

from dataclasses import dataclass

from gradtrail.core.common.validation import check
from gradtrail.core.data.augmentation import AugmentationConfig
from gradtrail.core.nn.models import CNNConfig, MLPConfig, ModelConfig, ModelKind
from gradtrail.core.nn.precision import Precision
from gradtrail.core.train.loss_scaling import LossScalingConfig
from gradtrail.core.train.optimizers import (
    AdamConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    OptimizerKind,
    RuleConfig,
    ScheduleFreeConfig,
    SGDConfig,
)
from gradtrail.core.train.schedules import (
    ConstantConfig,
    CosineConfig,
    ExponentialConfig,
    LinearConfig,
    OneCycleConfig,
    PiecewiseConfig,
    ScheduleConfig,
    ScheduleKind,
    WarmupCosineConfig,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training.

    Attributes:
        seed: determines the initial weights, the order of the examples, dropout and augmentation.
        epochs: passes over the training split, at most.
        batch_size: examples per optimizer step; the last batch of an epoch may be smaller.
        accumulation_steps: parts that each batch is worked in, one after the other; the gradient is that of the
            whole batch, the memory that of a part.
        loss_scaling: read with `precision: float16` only.
        remat: whether the backward pass computes activations again in place of keeping them.
        clip_norm: the global norm that gradients are scaled down to; None for no clipping.
        average_decay: of the moving average of the weights, which is then what is evaluated and kept; None for none.
        label_smoothing: share of the target spread over all classes.
        keep_epochs: epochs after which the weights are kept for analyses, 0 being the initial ones; those beyond
            the last are never reached.
        patience: epochs without a better validation accuracy after which the training ends; None to go on.
    """

    seed: int
    epochs: int
    batch_size: int
    accumulation_steps: int
    model: ModelKind
    mlp: MLPConfig
    cnn: CNNConfig
    precision: Precision
    loss_scaling: LossScalingConfig
    remat: bool
    optimizer: OptimizerKind
    sgd: SGDConfig
    adam: AdamConfig
    adamw: AdamWConfig
    lion: LionConfig
    muon: MuonConfig
    schedule_free: ScheduleFreeConfig
    schedule: ScheduleKind
    constant: ConstantConfig
    cosine: CosineConfig
    warmup_cosine: WarmupCosineConfig
    linear: LinearConfig
    exponential: ExponentialConfig
    piecewise: PiecewiseConfig
    one_cycle: OneCycleConfig
    clip_norm: float | None
    average_decay: float | None
    label_smoothing: float
    augmentation: AugmentationConfig
    keep_epochs: tuple[int, ...]
    patience: int | None

    def __post_init__(self) -> None:
        check("seed", self.seed, at_least=0, below=2**32)
        check("epochs", self.epochs, at_least=1, at_most=100_000)  # JAX counts the steps in int32
        check("batch_size", self.batch_size, at_least=1)
        check("accumulation_steps", self.accumulation_steps, at_least=1)
        check("label_smoothing", self.label_smoothing, at_least=0, below=1)
        if self.clip_norm is not None:
            check("clip_norm", self.clip_norm, above=0)
        if self.average_decay is not None:
            check("average_decay", self.average_decay, above=0, below=1)
        if self.patience is not None:
            check("patience", self.patience, at_least=1)
        for epoch in self.keep_epochs:
            check("keep_epochs", epoch, at_least=0)
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"accumulation_steps must divide batch_size {self.batch_size}, got {self.accumulation_steps}"
            )
        if self.average_decay is not None and self.optimizer == "schedule_free":
            raise ValueError(
                f"average_decay must be null with optimizer schedule_free, which averages by itself, "
                f"got {self.average_decay}"
            )

    def model_config(self, image_shape: tuple[int, int], num_classes: int) -> ModelConfig:
        """Return the network for images and classes of a data set."""
        return ModelConfig(
            kind=self.model,
            mlp=self.mlp if self.model == "mlp" else None,
            cnn=self.cnn if self.model == "cnn" else None,
            precision=self.precision,
            image_shape=image_shape,
            num_classes=num_classes,
        )

    def optimizer_config(self) -> OptimizerConfig:
        """Return the part that turns gradients into updates."""
        return OptimizerConfig(rule=self._rule(), schedule=self._schedule(), clip_norm=self.clip_norm)

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled against the underflow of its cotangents."""
        return self.precision == "float16"

    def _rule(self) -> RuleConfig:
        rules: dict[OptimizerKind, RuleConfig] = {
            "sgd": self.sgd,
            "adam": self.adam,
            "adamw": self.adamw,
            "lion": self.lion,
            "muon": self.muon,
            "schedule_free": self.schedule_free,
        }
        return rules[self.optimizer]

    def _schedule(self) -> ScheduleConfig:
        schedules: dict[ScheduleKind, ScheduleConfig] = {
            "constant": self.constant,
            "cosine": self.cosine,
            "warmup_cosine": self.warmup_cosine,
            "linear": self.linear,
            "exponential": self.exponential,
            "piecewise": self.piecewise,
            "one_cycle": self.one_cycle,
        }
        return schedules[self.schedule]
