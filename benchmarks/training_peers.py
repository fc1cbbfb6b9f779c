"""The loops that `benchmarks.training` compares: the same work, each in a process that loads one library.

    python -m benchmarks.training_peers FIELDS

`FIELDS` are those of a `Task`. Reports the seconds of each round that it is asked for, after one that is not
timed. Everything runs on the processor.
"""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.training_tasks import (
    CHANNELS,
    GROUPS,
    HIDDEN,
    IMAGE_SHAPE,
    KERNEL_SIZE,
    LEARNING_RATE,
    NUM_CLASSES,
    PATCH,
    STAGES,
    WEIGHT_DECAY,
    ModelName,
    Optimizer,
    Precision,
    Processor,
    Task,
    available_cores,
    make_data,
)
from benchmarks.turns import answer, read_task

if TYPE_CHECKING:
    from gradtrail.core.train.config import TrainConfig

Round = Callable[[], object]  # of a training in JAX it returns the weights
EPOCHS = 20  # more than any benchmark has rounds


def lesson(task: Task) -> Round:
    """Set up a jitted step called from Python, on float32 images that lie prepared on the host."""
    import jax
    import optax
    from flax import nnx

    pixels, labels = make_data(task.examples, task.image_shape)
    height, width, *channels = task.image_shape
    shape = (height, width, math.prod(channels)) if task.model != "mlp" else (math.prod(task.image_shape),)
    images = as_floats(pixels).reshape(-1, *shape)
    graphdef, params = nnx.split(flax_network(task.model, task.image_shape), nnx.Param)
    optimizer = optax.adam(LEARNING_RATE)
    opt_state = optimizer.init(params)
    rng = np.random.default_rng(0)

    @jax.jit
    def step(params: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        def loss_fn(params: Any) -> jax.Array:
            logits = nnx.merge(graphdef, params)(images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def epoch() -> Any:
        nonlocal params, opt_state
        for indices in rng.permutation(task.examples).reshape(-1, task.batch_size):
            params, opt_state, loss = step(params, opt_state, images[indices], labels[indices])
        return jax.block_until_ready((params, loss))[0]

    return epoch


def without_jit(task: Task) -> Round:
    """Set up the same loop without `jax.jit`: each operation is dispatched from Python."""
    import jax

    return jax.disable_jit()(lesson(task))


def pytorch(task: Task) -> Round:
    """Set up PyTorch's usual loop with the fused Adam; bfloat16 is by autocast."""
    import torch

    torch.set_num_threads(available_cores())
    torch.manual_seed(0)
    images, labels = torch_data(task.model, task.examples, task.image_shape)
    memory_format = torch.channels_last if task.channels_last else torch.contiguous_format
    network = torch_network(task.model, task.image_shape).to(memory_format=memory_format)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)

    def loss_fn(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bfloat16"):
            return torch.nn.functional.cross_entropy(network(images), labels)

    loss_of = torch.compile(loss_fn) if task.compiles else loss_fn

    def epoch() -> None:
        for indices in torch.randperm(task.examples).reshape(-1, task.batch_size):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(images[indices].to(memory_format=memory_format), labels[indices])
            loss.backward()
            optimizer.step()
        loss.item()

    return epoch


def ours(task: Task) -> Round:
    """Set up the compiled loop of this project, on uint8 images, with the step's records."""
    import jax

    from gradtrail.core.nn.models import Model
    from gradtrail.core.train import loop
    from gradtrail.core.train.keys import keys_of
    from gradtrail.core.xla.compiler import Compiler

    images, labels = make_data(task.examples, task.image_shape)
    config = project_train_config(task.model, task.batch_size, task.precision, task.optimizer)
    model = Model(config.model_config(task.image_shape, NUM_CLASSES), remat=config.remat)
    functions = loop.TrainingFunctions(config, model, task.examples, jax.local_devices())
    training = functions.compile(Compiler(time.perf_counter))
    state = training.init(keys_of(config.seeds_of(config.seed)))
    examples = loop.on_device(images, labels, training.mesh)
    chunks = training.train(state, examples, steps_per_call=training.steps_per_epoch)
    return lambda: jax.block_until_ready(next(chunks).state.params)


def bare(task: Task) -> Round:
    """Set up the least compiled loop around the network of this project: gather, gradient, Optax' Adam; no records."""
    import jax
    import optax

    from gradtrail.core.batching import shuffled_batches
    from gradtrail.core.nn.losses import cross_entropy
    from gradtrail.core.nn.models import Model, Params

    images, labels = map(jax.numpy.asarray, make_data(task.examples, task.image_shape))
    config = project_train_config(task.model, task.batch_size, task.precision)
    model = Model(config.model_config(task.image_shape, NUM_CLASSES))
    optimizer = optax.adam(LEARNING_RATE)
    params = model.init(key=jax.random.key(0))
    state = params, optimizer.init(params)

    def loss_fn(params: Params, indices: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, images[indices]), labels[indices]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def run_steps(state: Any, key: jax.Array) -> Any:
        order = shuffled_batches(task.examples, task.batch_size, key=key)

        def body(index: int, state: Any) -> Any:
            params, opt_state = state
            updates, opt_state = optimizer.update(jax.grad(loss_fn)(params, order[index]), opt_state)
            return optax.apply_updates(params, updates), opt_state

        return jax.lax.fori_loop(0, task.steps, body, state)

    def epoch() -> Any:
        nonlocal state
        state = jax.block_until_ready(run_steps(state, jax.random.key(0)))
        return state[0]

    return epoch


def timed(run_round: Round) -> float:
    """Return the seconds of a round."""
    started = time.perf_counter()
    run_round()
    return time.perf_counter() - started


def as_floats(pixels: np.ndarray) -> np.ndarray:
    return pixels.astype(np.float32) / np.float32(255)


def flax_network(model: ModelName, shape: tuple[int, ...]) -> Any:
    """Return the network for images of this shape with channels last: the lesson's."""
    from flax import nnx

    rngs = nnx.Rngs(0)
    height, width, *channels = shape
    if model == "mlp":
        return nnx.Sequential(
            nnx.Linear(math.prod(shape), 256, rngs=rngs),
            nnx.relu,
            nnx.Linear(256, 128, rngs=rngs),
            nnx.relu,
            nnx.Linear(128, 10, rngs=rngs),
        )
    pool = functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
    if model == "resnet":

        def to_patches(images: Any) -> Any:
            rows, columns = height // PATCH, width // PATCH
            patches = images.reshape(-1, rows, PATCH, columns, PATCH, math.prod(channels)).swapaxes(2, 3)
            return patches.reshape(*patches.shape[:3], -1)

        class Block(nnx.Module):
            def __init__(self, inputs: int, outputs: int):
                self.norms = nnx.List(nnx.GroupNorm(size, GROUPS, rngs=rngs) for size in (inputs, outputs))
                sizes = (inputs, outputs), (outputs, outputs)
                self.convolutions = nnx.List(nnx.Conv(*pair, (3, 3), rngs=rngs) for pair in sizes)
                self.project = nnx.Conv(inputs, outputs, (1, 1), rngs=rngs) if inputs != outputs else None

            def __call__(self, images: Any) -> Any:
                found = nnx.relu(self.norms[0](images))
                inner = self.convolutions[1](nnx.relu(self.norms[1](self.convolutions[0](found))))
                return inner + (self.project(found) if self.project else images)

        blocks = [layer for pair in pairwise((STAGES[0], *STAGES)) for layer in (pool, Block(*pair))][1:]
        return nnx.Sequential(
            to_patches,
            nnx.Conv(math.prod(channels) * PATCH**2, STAGES[0], (3, 3), rngs=rngs),
            *blocks,
            nnx.GroupNorm(STAGES[-1], GROUPS, rngs=rngs),
            lambda images: nnx.relu(images).mean((1, 2)),
            nnx.Linear(STAGES[-1], 10, rngs=rngs),
        )
    return nnx.Sequential(
        nnx.Conv(math.prod(channels), 32, (3, 3), rngs=rngs),
        nnx.relu,
        pool,
        nnx.Conv(32, 64, (3, 3), rngs=rngs),
        nnx.relu,
        pool,
        lambda images: images.reshape(len(images), -1),
        nnx.Linear(64 * (height // 4) * (width // 4), 128, rngs=rngs),
        nnx.relu,
        nnx.Linear(128, 10, rngs=rngs),
    )


def torch_data(network: str, num_examples: int, shape: tuple[int, ...] = IMAGE_SHAPE) -> tuple[Any, Any]:
    """Return images, float32, and labels as PyTorch takes them: channels first, or flat for an MLP."""
    import torch

    pixels, labels = make_data(num_examples, shape)
    height, width, *channels = shape
    images = torch.from_numpy(as_floats(pixels)).reshape(-1, height, width, math.prod(channels))
    images = images.flatten(1) if network == "mlp" else images.permute(0, 3, 1, 2).contiguous()
    return images, torch.from_numpy(labels).long()


def torch_network(model: ModelName, shape: tuple[int, ...] = IMAGE_SHAPE) -> Any:
    """Return the network for images of this shape, channels first."""
    from torch import nn

    height, width, *channels = shape
    if model == "mlp":
        first = nn.Linear(math.prod(shape), 256)
        return nn.Sequential(first, nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    if model == "resnet":

        class Block(nn.Module):
            def __init__(self, inputs: int, outputs: int):
                super().__init__()
                self.norms = nn.ModuleList(nn.GroupNorm(GROUPS, size) for size in (inputs, outputs))
                sizes = (inputs, outputs), (outputs, outputs)
                self.convolutions = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in sizes)
                self.project = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

            def forward(self, images: Any) -> Any:
                found = nn.functional.relu(self.norms[0](images))
                inner = nn.functional.relu(self.norms[1](self.convolutions[0](found)))
                return self.convolutions[1](inner) + (self.project(found) if self.project else images)

        blocks = [layer for pair in pairwise((STAGES[0], *STAGES)) for layer in (nn.MaxPool2d(2), Block(*pair))][1:]
        stem = nn.PixelUnshuffle(PATCH), nn.Conv2d(math.prod(channels) * PATCH**2, STAGES[0], 3, padding=1)
        head = nn.GroupNorm(GROUPS, STAGES[-1]), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        return nn.Sequential(*stem, *blocks, *head, nn.Linear(STAGES[-1], 10))
    return nn.Sequential(
        nn.Conv2d(math.prod(channels), 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def set_up_as_stage(processor: Processor = "any") -> None:
    """Set JAX up as the stages do; before it looks for devices."""
    from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, set_up_jax
    from gradtrail.stages.common.params import load_section

    environment = replace(load_section("environment", EnvironmentConfig), processor=processor)
    set_up_jax(environment, load_section("runtime", RuntimeConfig))


def project_train_config(
    model: ModelName, batch_size: int, precision: Precision = "float32", optimizer: Optimizer = "adam"
) -> "TrainConfig":
    """Return the params of the project with everything replaced that the work of a step depends on."""
    from gradtrail.core.nn.cnn import CNN
    from gradtrail.core.nn.losses import CROSS_ENTROPY
    from gradtrail.core.nn.mlp import MLP
    from gradtrail.core.nn.resnet import ResNet
    from gradtrail.core.train.augmentation import NO_AUGMENTATION
    from gradtrail.core.train.config import TrainConfig
    from gradtrail.core.train.optimizers import Adam, AdamW, Muon
    from gradtrail.core.train.privacy import NOT_PRIVATE
    from gradtrail.core.train.schedules import Constant
    from gradtrail.stages.common.params import load_section

    networks: dict[str, Any] = {
        "mlp": MLP(hidden=HIDDEN["mlp"], activation="relu", dropout=0.0),
        "cnn": CNN(
            channels=CHANNELS,
            convolutions=1,
            kernel_size=KERNEL_SIZE,
            norm="none",
            groups=1,
            hidden=HIDDEN["cnn"],
            activation="relu",
            dropout=0.0,
        ),
        "resnet": ResNet(patch=PATCH, channels=STAGES, blocks=1, groups=GROUPS, activation="relu", dropout=0.0),
    }
    adam = {"learning_rate": LEARNING_RATE, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
    muon = {"learning_rate": LEARNING_RATE, "adam_learning_rate": LEARNING_RATE, "beta": 0.95}
    optimizers: dict[str, Any] = {
        "adam": Adam(**adam),
        "adamw": AdamW(**adam, weight_decay=WEIGHT_DECAY),
        "muon": Muon(**muon, weight_decay=WEIGHT_DECAY),
    }
    return replace(
        load_section("train", TrainConfig),
        seed=0,
        epochs=EPOCHS,
        batch_size=batch_size,
        accumulation_steps=1,
        shards=1,
        model=networks[model],
        precision=precision,
        remat=False,
        optimizer=optimizers[optimizer],
        schedule=Constant(warmup_fraction=0.0),
        clip_norm=None,
        average_decay=None,
        loss=CROSS_ENTROPY,
        augmentation=NO_AUGMENTATION,
        patience=None,
        privacy=NOT_PRIVATE,
    )


def main() -> None:
    task = read_task(Task)
    loops = {"lesson": lesson, "without_jit": without_jit, "pytorch": pytorch, "ours": ours, "bare": bare}
    if task.loop == "ours":
        set_up_as_stage(task.processor)
    run_round = loops[task.loop](task)
    run_round()
    answer("ready", lambda: timed(run_round))


if __name__ == "__main__":
    main()
