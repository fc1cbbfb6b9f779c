"""The methods to per-example gradient norms that `benchmarks.per_example_gradients` compares, each in its own process.

    python -m benchmarks.per_example_peers FIELDS

`FIELDS` are those of a `ScoreTask`. Reports the seconds of each round that it is asked for, after one that is not
timed, and the bytes by which the process grew at its largest since it began to work. Everything runs on the processor.
"""

import time
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.training_peers import (
    Round,
    ours,
    project_train_config,
    set_up_as_stage,
    timed,
    torch_data,
    torch_network,
)
from benchmarks.training_tasks import IMAGE_SHAPE, NUM_CLASSES, ModelName, Task, available_cores, make_data
from benchmarks.turns import answer, read_task
from gradtrail.support.running_time import peak_memory_bytes

Method = Literal["mean", "vmap", "ours", "training", "opacus hooks", "opacus ghost", "torch.func"]
TRAINING_BATCH = 128


@dataclass(frozen=True, kw_only=True)
class ScoreTask:
    """The task of a process."""

    method: Method  # `mean` is the gradient of whole batches, `training` an epoch of training
    model: ModelName
    batch_size: int  # examples at a time; 0 for `ours`, which chooses its own
    examples: int  # in a round
    image_shape: tuple[int, ...] = IMAGE_SHAPE

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that the method needs, other than this project's."""
        return ("torch", "opacus") if self.method in ("opacus hooks", "opacus ghost", "torch.func") else ()


def mean(task: ScoreTask) -> Round:
    """Set up the mean gradient of each batch: what training computes."""
    import jax
    import jax.numpy as jnp

    from gradtrail.core.nn import losses

    model, params = _model(task)

    @jax.jit
    def grad(images: jax.Array, labels: jax.Array) -> Any:
        return jax.grad(lambda params: jnp.mean(losses.cross_entropy(model.apply(params, images), labels)))(params)

    return _over_batches(task, grad)


def vmap(task: ScoreTask) -> Round:
    """Set up the definition: the gradient of each example, and its norm."""
    import jax
    import jax.numpy as jnp

    from gradtrail.core.nn import losses

    model, params = _model(task)

    def loss(params: Any, image: jax.Array, label: jax.Array) -> jax.Array:
        return losses.cross_entropy(model.apply(params, image[None]), label[None])[0]

    @jax.jit
    def norms(images: jax.Array, labels: jax.Array) -> jax.Array:
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, images, labels)
        squares = [jnp.sum(jnp.square(leaf.reshape(len(leaf), -1)), axis=1) for leaf in jax.tree.leaves(grads)]
        return jnp.sqrt(sum(squares))

    return _over_batches(task, norms)


def this_project(task: ScoreTask) -> Round:
    """Set up the pass of the `gradients` stage: norm, layer by layer too, EL2N, loss, margin and the rest."""
    from gradtrail.core.gradients.passes import compile_passes
    from gradtrail.core.nn.losses import CROSS_ENTROPY
    from gradtrail.core.xla.compiler import Compiler

    model, params = _model(task)
    passes = compile_passes(model, CROSS_ENTROPY, compiler=Compiler(time.perf_counter))
    images, labels = make_data(task.examples, task.image_shape)
    return lambda: passes.score(params, images, labels, advance=lambda _: None)


def training(task: ScoreTask) -> Round:
    """Set up an epoch of training the same network in float32."""
    examples = task.examples // TRAINING_BATCH * TRAINING_BATCH
    shape = task.image_shape
    return ours(Task(loop="ours", model=task.model, batch_size=TRAINING_BATCH, examples=examples, image_shape=shape))


def opacus_hooks(task: ScoreTask) -> Round:
    """Set up Opacus: backward hooks that keep the gradient of each example."""
    import torch
    from opacus.grad_sample import GradSampleModule

    network = GradSampleModule(_torch_network(task))

    def norms(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        network.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        squares = [parameter.grad_sample.flatten(1).square().sum(dim=1) for parameter in network.parameters()]
        for parameter in network.parameters():
            parameter.grad_sample = None
        return torch.stack(squares).sum(dim=0).sqrt()

    return _over_torch_batches(task, norms)


def opacus_ghost(task: ScoreTask) -> Round:
    """Set up Opacus with ghost clipping: the norms, by activations and their gradients."""
    import torch
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    network = GradSampleModuleFastGradientClipping(_torch_network(task), use_ghost_clipping=True)

    def norms(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        network.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(network(images), labels).backward()
        return network.get_norm_sample()

    return _over_torch_batches(task, norms)


def torch_func(task: ScoreTask) -> Round:
    """Set up `torch.func`: `vmap` of `grad`, and the norms."""
    import torch
    from torch.func import functional_call, grad, vmap

    network = _torch_network(task)
    parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = functional_call(network, parameters, (image[None],))
        return torch.nn.functional.cross_entropy(logits, label[None])

    each = vmap(grad(loss), (None, 0, 0))

    def norms(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        found = each(parameters, images, labels)
        return torch.stack([leaf.flatten(1).square().sum(dim=1) for leaf in found.values()]).sum(dim=0).sqrt()

    return _over_torch_batches(task, norms)


def _model(task: ScoreTask) -> tuple[Any, Any]:
    import jax

    from gradtrail.core.nn.models import Model

    config = project_train_config(task.model, TRAINING_BATCH)
    model = Model(config.model_config(task.image_shape, NUM_CLASSES))
    return model, model.init(key=jax.random.key(0))


def _over_batches(task: ScoreTask, function: Any) -> Round:
    """Return a round over whole batches; all of them are in flight before the first result is awaited."""
    import jax

    images, labels = map(jax.numpy.asarray, make_data(task.examples, task.image_shape))
    starts = range(0, task.examples, task.batch_size)
    parts = [(images[start : start + task.batch_size], labels[start : start + task.batch_size]) for start in starts]

    def run() -> None:
        for part in parts:
            found = function(*part)
        jax.block_until_ready(found)

    return run


def _over_torch_batches(task: ScoreTask, function: Any) -> Round:
    images, labels = torch_data(task.model, task.examples, task.image_shape)

    def run() -> None:
        for start in range(0, task.examples, task.batch_size):
            function(images[start : start + task.batch_size], labels[start : start + task.batch_size])

    return run


def _torch_network(task: ScoreTask) -> Any:
    import torch

    torch.set_num_threads(available_cores())
    torch.manual_seed(0)
    return torch_network(task.model, task.image_shape)


def main() -> None:
    task = read_task(ScoreTask)
    methods = {
        "mean": mean,
        "vmap": vmap,
        "ours": this_project,
        "training": training,
        "opacus hooks": opacus_hooks,
        "opacus ghost": opacus_ghost,
        "torch.func": torch_func,
    }
    if task.method in ("ours", "training"):
        set_up_as_stage()
    run_round = methods[task.method](task)
    before = peak_memory_bytes()
    run_round()
    answer("ready", lambda: (timed(run_round), peak_memory_bytes() - before))


if __name__ == "__main__":
    main()
