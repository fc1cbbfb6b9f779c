"""The private steps that `benchmarks.private_training` compares, each in a process that loads one library.

    python -m benchmarks.private_peers FIELDS

`FIELDS` are those of a `PrivateTask`. When it is ready it reports versions and steps, and of each round the mean
seconds of a step. Everything runs on the processor. Every method trains with Adam at a constant rate, clips to norm 1
and adds noise, where it is private.
"""

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from benchmarks.training_peers import project_train_config, set_up_as_stage, torch_data, torch_network
from benchmarks.training_tasks import IMAGE_SHAPE, LEARNING_RATE, NUM_CLASSES, available_cores, make_data
from benchmarks.turns import answer, read_task

Method = Literal["ordinary", "private", "vmap", "ghost", "hooks"]
Network = Literal["mlp", "cnn", "strided"]
Round = Callable[[int], float]  # makes so many steps; returns the seconds of one

EXAMPLES = 55_000
CLIP_NORM, NOISE_MULTIPLIER, DELTA = 1.0, 1.0, 1e-5
MICROBATCH = {"mlp": 8, "cnn": 8, "strided": 32}  # of `vmap`, whose gradients are then in the processor's cache
SMALL_CHANNELS, SMALL_HIDDEN = (8, 24), (32,)  # as many multiplications as the strided network, 0.43 to 0.42 million
FEWEST_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class PrivateTask:
    """The task of a process."""

    method: Method  # `vmap` is JAX' definition of per-example gradients in microbatches; `ghost` and `hooks` are Opacus
    network: Network  # `strided` is that of Opacus' MNIST example; ours of as many multiplications has no strides
    batch_size: int  # the mean one if batches are drawn by Poisson sampling
    seconds: float  # that a round should take; it has whole steps, at most those of an epoch

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that the method needs, other than this project's."""
        return ("torch", "opacus") if self.method in ("ghost", "hooks") else ()

    @property
    def steps_per_epoch(self) -> int:
        """Steps over as many examples as there are."""
        return -(-EXAMPLES // self.batch_size)


def ours(task: PrivateTask) -> Round:
    """Set up the compiled loop of this project, with the step's records.

    Batches are drawn for a whole epoch at once; each step is charged its share of that.
    """
    import jax
    import numpy as np

    from gradtrail.core.nn.models import Model
    from gradtrail.core.train import loop
    from gradtrail.core.train.keys import keys_of
    from gradtrail.core.xla.compiler import Compiler

    config = _config(task)
    noise = None if task.method == "ordinary" else NOISE_MULTIPLIER
    model = Model(config.model_config(IMAGE_SHAPE, NUM_CLASSES))
    functions = loop.TrainingFunctions(config, model, EXAMPLES, jax.local_devices(), noise)
    training = functions.compile(Compiler(time.perf_counter))
    state, records = training.init(keys_of(config.seeds_of(config.seed))), training.records()
    examples = loop.on_device(*make_data(EXAMPLES), training.mesh)
    epochs = itertools.count()

    def run(steps: int) -> float:
        nonlocal state, records
        started = time.perf_counter()
        order = jax.block_until_ready(training.order(state.keys, np.int32(next(epochs))))
        drawn = time.perf_counter()
        state, records = training.run_steps(state, records, examples, order, np.int32(0), np.int32(steps))
        jax.block_until_ready((state, records))
        return (drawn - started) / training.steps_per_epoch + (time.perf_counter() - drawn) / steps

    return run


def vmap(task: PrivateTask) -> Round:
    """Set up the gradients of single examples by `vmap(grad)`, in shuffled batches of a fixed size."""
    import jax
    import jax.numpy as jnp
    import optax

    from gradtrail.core.batching import shuffled_batches

    apply, params = _strided_in_jax() if task.network == "strided" else _project_network(task)
    images, labels = map(jnp.asarray, make_data(EXAMPLES))
    optimizer = optax.adam(LEARNING_RATE)
    size = MICROBATCH[task.network]

    def loss_fn(params: Any, index: jax.Array) -> jax.Array:
        logits = apply(params, images[index][None])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[index][None])[0]

    def clipped_sum(params: Any, batch: jax.Array) -> Any:
        each = jax.vmap(jax.grad(loss_fn), (None, 0))(params, batch)
        factors = jnp.minimum(1.0, CLIP_NORM / jax.vmap(optax.global_norm)(each))
        return jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, 1), each)

    def step(state: Any, batch: jax.Array, key: jax.Array) -> Any:
        params, opt_state = state

        def add(total: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, clipped_sum(params, part)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch.reshape(-1, size))
        flat, restore = jax.flatten_util.ravel_pytree(total)
        noise = NOISE_MULTIPLIER * CLIP_NORM * jax.random.normal(key, flat.shape)
        updates, opt_state = optimizer.update(restore((flat + noise) / task.batch_size), opt_state)
        return optax.apply_updates(params, updates), opt_state

    @jax.jit
    def run_steps(state: Any, key: jax.Array, steps: int) -> Any:
        order = shuffled_batches(EXAMPLES, task.batch_size, key=key)[: EXAMPLES // task.batch_size]
        return jax.lax.fori_loop(
            0, steps, lambda index, state: step(state, order[index % len(order)], jax.random.fold_in(key, index)), state
        )

    state = params, optimizer.init(params)

    def run(steps: int) -> float:
        nonlocal state
        started = time.perf_counter()
        state = jax.block_until_ready(run_steps(state, jax.random.key(0), steps))
        return (time.perf_counter() - started) / steps

    return run


def opacus(task: PrivateTask) -> Round:
    """Set up a private training by Opacus.

    It gets Poisson-sampled batches as slices of one tensor, which is faster than the loader of `make_private`.
    """
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    images, labels, network, optimizer = _torch_training(task)
    loader = DataLoader(TensorDataset(images, labels), batch_size=task.batch_size)
    criterion = torch.nn.CrossEntropyLoss()
    ghost = task.method != "hooks"
    made = PrivacyEngine(accountant="rdp").make_private(
        module=network,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        poisson_sampling=True,
        grad_sample_mode="ghost" if ghost else "hooks",
    )
    network, optimizer = made[0], made[1]
    criterion = made[2] if ghost else criterion

    def batches() -> Iterator[Any]:
        while True:
            (indices,) = torch.nonzero(torch.rand(EXAMPLES) < task.batch_size / EXAMPLES, as_tuple=True)
            yield images[indices], labels[indices]

    return _torch_round(network, optimizer, criterion, batches())


def _config(task: PrivateTask) -> Any:
    config: Any = project_train_config("mlp" if task.network == "mlp" else "cnn", task.batch_size)
    if task.network == "strided":
        config = replace(config, model=replace(config.model, channels=SMALL_CHANNELS, hidden=SMALL_HIDDEN))
    private = replace(
        config.privacy,
        enabled=task.method != "ordinary",
        epsilon=None,
        noise_multiplier=NOISE_MULTIPLIER,
        delta=DELTA,
        example_clip_norm=CLIP_NORM,
        augmentation_multiplicity=1,
        release=False,
    )
    return replace(config, privacy=private)


def _project_network(task: PrivateTask) -> Any:
    import jax

    from gradtrail.core.nn.models import Model

    model = Model(_config(task).model_config(IMAGE_SHAPE, NUM_CLASSES))
    return model.apply, model.init(key=jax.random.key(0))


def _strided_in_jax() -> Any:
    """Return the network of Opacus' MNIST example as a function of parameters and images."""
    import jax
    import jax.numpy as jnp

    shapes = ((8, 8, 1, 16), (4, 4, 16, 32), (512, 32), (32, NUM_CLASSES))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    initializer = jax.nn.initializers.lecun_normal()
    params = [(initializer(key, shape), jnp.zeros(shape[-1])) for key, shape in zip(keys, shapes, strict=True)]

    def convolved(layer: Any, inputs: jax.Array, padding: Any) -> jax.Array:
        kernel, bias = layer
        found = jax.lax.conv_general_dilated(
            inputs, kernel, (2, 2), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        window = (1, 2, 2, 1)
        return jax.lax.reduce_window(jax.nn.relu(found + bias), -jnp.inf, jax.lax.max, window, (1, 1, 1, 1), "VALID")

    def apply(params: Any, images: jax.Array) -> jax.Array:
        first, second, third, (kernel, bias) = params
        hidden = convolved(first, images[..., None].astype(jnp.float32) / 255, ((3, 3), (3, 3)))
        hidden = convolved(second, hidden, "VALID").reshape(len(images), -1)
        return jax.nn.relu(hidden @ third[0] + third[1]) @ kernel + bias

    return apply, params


def _torch_training(task: PrivateTask) -> tuple[Any, Any, Any, Any]:
    import torch

    warnings.filterwarnings("ignore")  # of Opacus: its generator is not a cryptographic one either
    torch.set_num_threads(available_cores())
    torch.manual_seed(0)
    images, labels = torch_data(task.network, EXAMPLES)
    network = _strided_in_torch() if task.network == "strided" else torch_network(task.network)
    return images, labels, network, torch.optim.Adam(network.parameters(), LEARNING_RATE, fused=True)


def _strided_in_torch() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, NUM_CLASSES),
    )


def _torch_round(network: Any, optimizer: Any, criterion: Any, batches: Iterator[Any]) -> Round:
    def run(steps: int) -> float:
        started = time.perf_counter()
        for images, labels in itertools.islice(batches, steps):
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(network(images), labels)
            loss.backward()
            optimizer.step()
        loss.item()
        return (time.perf_counter() - started) / steps

    return run


def _steps_of_round(run: Round, task: PrivateTask) -> int:
    """Return the steps that take about as long as a round should, after a warm-up."""
    run(FEWEST_STEPS)
    wanted = task.seconds / run(FEWEST_STEPS)
    return int(min(max(wanted, FEWEST_STEPS), task.steps_per_epoch))


def _versions() -> dict[str, str]:
    found = {}
    for package in ("jax", "torch", "opacus"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    task = read_task(PrivateTask)
    methods = {"ordinary": ours, "private": ours, "vmap": vmap, "ghost": opacus, "hooks": opacus}
    if methods[task.method] is ours:
        set_up_as_stage()
    run = methods[task.method](task)
    steps = _steps_of_round(run, task)
    answer((_versions(), steps), lambda: run(steps))


if __name__ == "__main__":
    main()
