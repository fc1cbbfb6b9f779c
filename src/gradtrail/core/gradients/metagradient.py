"""Derivatives of a trained network's outputs by the weight of each training example, through the whole training.

The training runs forward and keeps a state every few steps. Then the parts between these states run again, from the
last one to the first, each with the intermediate values that its reverse-mode derivative needs. The derivatives of
several outputs are pulled back at once. Source: metagradient descent (Engstrom et al., arXiv 2503.13751) and MAGIC
(Ilyas and Engstrom, arXiv 2504.16430).
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from gradtrail.core.batching import PADDING
from gradtrail.core.config import ConfigError
from gradtrail.core.nn.models import Model, Params
from gradtrail.core.train.config import TrainConfig
from gradtrail.core.train.gradient import Examples
from gradtrail.core.train.loop import TrainingFunctions
from gradtrail.core.train.step import RunKeys, Step, TrainState, started_from, take
from gradtrail.core.xla.compiler import CompiledFunction, Compiler

# Outputs of a network; the arrays of a `jax.tree_util.Partial` are arguments of the compiled function, not constants
Outputs = Callable[[Params], Float[Array, " outputs"]]
_DIFFERENTIATED = ("sgd", "rmsprop", "adam", "adamw")


def require_differentiable(config: TrainConfig) -> None:
    """Raise ConfigError, one line, for a training whose result has no derivative, or that already has changes."""
    kind, kinds, patience = config.optimizer.kind, ", ".join(_DIFFERENTIATED), config.patience
    mixup = config.augmentation.mixup
    changes = ", ".join(name for name, value in dataclasses.asdict(config.changes).items() if value)
    refusals = {
        f"optimizer must be one of {kinds}, got {kind}": kind not in _DIFFERENTIATED,
        "privacy.enabled must be false: clipping and noise hide each example, got true": config.privacy.enabled,
        "precision must be float32 or bfloat16: loss scaling has no derivative, got float16": config.scales_loss,
        f"augmentation.mixup must be 0: it mixes an example into others, got {mixup}": mixup > 0,
        f"patience must be empty: the number of epochs has no derivative, got {patience}": patience is not None,
        f"changes must be empty: effects of changes are predicted, got {changes}": config.changes.enabled,
    }
    for message, is_refused in refusals.items():
        if is_refused:
            raise ConfigError(f"what_if: train.{message}")


@dataclass(frozen=True, kw_only=True)
class Metagradient:
    """The compiled functions of a training and of its derivative."""

    training: TrainingFunctions
    init: CompiledFunction
    order: CompiledFunction
    run: CompiledFunction  # (state, examples, order of a part, number of steps before it) → state after the part
    with_derivative: CompiledFunction  # (`output_function`, state) → see `outputs`
    # (state before a part, examples, its order, steps before it, derivatives by the floats after it, sums of the
    # derivatives by the weights) → derivatives by the floats before it, and the sums with those of the part
    pull_back: CompiledFunction
    steps_per_part: int
    output_function: Outputs
    start: Mapping[str, np.ndarray] = field(default_factory=dict)  # parameters of the first state, see `started_from`

    @property
    def functions(self) -> list[CompiledFunction]:
        """All compiled functions."""
        return [self.init, self.order, self.run, self.with_derivative, self.pull_back]

    def outputs(self, state: TrainState) -> tuple[Array, list[Array]]:
        """Return the outputs, and their derivatives by the floats of the state."""
        outputs: tuple[Array, list[Array]] = self.with_derivative(self.output_function, state)
        return outputs

    def states(self, keys: Key[Array, " purposes"], examples: Examples) -> Iterator[TrainState]:
        """Train; yield the states before each part, and the one after the last step."""
        state = started_from(self.init(keys), self.start)
        order = self._order(state.keys)
        yield state
        for start in range(0, self.training.num_steps, self.steps_per_part):
            state = self.run(state, examples, *self._part(order, start))
            yield state

    def train(self, keys: Key[Array, " purposes"], examples: Examples) -> TrainState:
        """Train; return the state after the last step."""
        return collections.deque(self.states(keys, examples), maxlen=1).pop()

    def derivative(
        self, states: list[TrainState], examples: Examples, advance: Callable[[int], object] = lambda _: None
    ) -> tuple[Float[np.ndarray, " outputs"], Float[np.ndarray, "outputs examples classes"]]:
        """Return the outputs of a trained network, and their derivatives by `Examples.weight_changes` at `examples`.

        Args:
            states: `states` of the training on `examples`; they are removed from the list, which frees their memory.
            examples: the training split.
            advance: called with the number of steps of each part.
        """
        order = self._order(states[0].keys)
        values, cotangents = self.outputs(states.pop())
        sums = np.zeros((len(values), *self.training.abstract_examples.weight_changes.shape), np.float32)
        for start in reversed(range(0, self.training.num_steps, self.steps_per_part)):
            cotangents, sums = self.pull_back(states.pop(), examples, *self._part(order, start), cotangents, sums)
            advance(min(self.steps_per_part, self.training.num_steps - start))
        return np.asarray(values), np.asarray(sums)

    def _order(self, keys: RunKeys) -> Int[np.ndarray, "steps batch"]:
        epochs = [self.order(keys, np.int32(epoch)) for epoch in range(self.training.config.epochs)]
        order = np.concatenate(jax.device_get(epochs))
        return np.pad(order, ((0, -len(order) % self.steps_per_part), (0, 0)), mode="edge")

    def _part(self, order: np.ndarray, start: int) -> tuple[np.ndarray, np.int32]:
        return order[start : start + self.steps_per_part], np.int32(start)


def compile_metagradient(
    config: TrainConfig, model: Model, num_examples: int, outputs: Outputs, *, memory_bytes: int, compiler: Compiler
) -> Metagradient:
    """Compile the derivative of `outputs` of a training on one device, in parts whose memory is within a budget.

    Raises:
        ConfigError: the training has no derivative, or needs more memory; one line.
    """
    require_differentiable(config)
    config = dataclasses.replace(config, shards=1)
    training = TrainingFunctions(config, model, num_examples, jax.devices()).with_weight_changes()
    num_steps, state = training.num_steps, training.abstract_state
    run = functools.partial(run_part, training.step, num_steps)
    outputs = outputs if isinstance(outputs, jax.tree_util.Partial) else jax.tree_util.Partial(outputs)
    examples, changes = training.abstract_examples, training.abstract_examples.weight_changes
    values, cotangents = jax.eval_shape(_outputs_with_derivative, outputs, state)
    sums = jax.ShapeDtypeStruct((*values.shape, *changes.shape), jnp.float32)
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in floats_of(state))

    def part(steps: int) -> tuple[Any, ...]:
        order = jax.ShapeDtypeStruct((steps, config.batch_size), jnp.int32)
        return state, examples, order, jax.ShapeDtypeStruct((), jnp.int32)

    with_derivative = compiler.compile("outputs", _outputs_with_derivative, outputs, state)
    pull_backs: dict[int, CompiledFunction] = {}

    def pull_back_bytes(steps: int) -> int:
        function, arguments = functools.partial(pull_back_part, run), (*part(steps), cotangents, sums)
        pull_backs[steps] = compiler.compile("pull_back", function, *arguments, donate_argnums=(4, 5))
        return pull_backs[steps].cost.total_bytes

    fixed = with_derivative.cost.total_bytes
    steps, needed = choose_length(pull_back_bytes, num_steps, state_bytes, fixed, memory_bytes)
    if needed > memory_bytes:
        raise ConfigError(
            f"what_if.memory_mib must be at least {math.ceil(needed / 2**20):,} for {num_steps:,} steps and "
            f"{values.size} outputs, got {memory_bytes // 2**20:,}; fewer of either, or a smaller network, need less"
        )
    return Metagradient(
        training=training,
        init=compiler.compile("init", training.init, training.abstract_keys),
        order=compiler.compile("order", training.order, state.keys, jax.ShapeDtypeStruct((), jnp.int32)),
        run=compiler.compile("train_part", run, *part(steps)),
        with_derivative=with_derivative,
        output_function=outputs,
        pull_back=pull_backs[steps],
        steps_per_part=steps,
    )


def choose_length(
    part_bytes: Callable[[int], int], num_steps: int, state_bytes: int, output_bytes: int, memory_bytes: int
) -> tuple[int, int]:
    """Return the number of steps of a part and the bytes of the derivative: within the budget, or the least found.

    Short parts have many states before them, long ones many products. The memory of a part is about linear in its
    steps, so the next length to try is the best one on the line through the two that needed least.

    Args:
        part_bytes: steps of a part → its memory, which takes a compilation.
        state_bytes: memory of the state before each part.
        output_bytes: memory of the derivative of the outputs, while the states are there but no part.
        memory_bytes: budget.
    """

    def needed(steps: Any, of_part: Any) -> Any:
        return np.maximum(of_part, output_bytes) + state_bytes * -(-num_steps // steps)

    lengths, parts = np.arange(1, num_steps + 1), dict[int, int]()
    steps = math.ceil(math.sqrt(num_steps) / 2)  # the products of a step often take more memory than a state
    while steps not in parts:
        parts[steps] = part_bytes(steps)
        if needed(steps, parts[steps]) <= memory_bytes:
            break
        if len(parts) == 1:
            steps = 2 * steps if state_bytes * num_steps / steps > parts[steps] else steps // 2
            steps = min(max(steps, 1), num_steps)
        else:
            best, second = sorted(parts, key=lambda steps: needed(steps, parts[steps]))[:2]
            slope = (parts[second] - parts[best]) / (second - best)
            steps = int(lengths[np.argmin(needed(lengths, parts[best] + slope * (lengths - best)))])
    steps = min(parts, key=lambda steps: needed(steps, parts[steps]))
    return steps, int(needed(steps, parts[steps]))


def run_part(
    step: Step, num_steps: int, state: TrainState, examples: Examples, order: Array, start: Array
) -> TrainState:
    """Make the steps of a part; those beyond the end of the training change nothing.

    Of a step only its products are kept for the derivative, as the rest is faster to compute again than to read.
    """

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def body(state: TrainState, inputs: tuple[Array, Array]) -> tuple[TrainState, None]:
        index, indices = inputs
        after, _ = step(state, take(examples, indices))
        return jax.tree.map(functools.partial(jnp.where, index < num_steps), after, state), None

    return jax.lax.scan(body, state, (start + jnp.arange(len(order), dtype=jnp.int32), order))[0]


def pull_back_part(
    run: Callable[..., TrainState],
    state: TrainState,
    examples: Examples,
    order: Int[Array, "steps batch"],
    start: Int[Array, ""],
    cotangents: list[Array],
    sums: Float[Array, "outputs examples classes"],
) -> tuple[list[Array], Float[Array, "outputs examples classes"]]:
    """Pull the derivatives of the outputs back through a part, and add those by the weights of its examples."""
    places = order.ravel()
    rows = jax.tree.map(lambda column: column[jnp.where(places != PADDING, places, 0)], examples)
    row_order = jnp.where(order == PADDING, PADDING, jnp.arange(order.size, dtype=jnp.int32).reshape(order.shape))

    def floats_after(floats: list[Array], changes: Array) -> list[Array]:
        part = Examples(images=rows.images, labels=rows.labels, weight_changes=changes)
        return floats_of(run(with_floats(state, floats), part, row_order, start))

    _, pull = jax.vjp(floats_after, floats_of(state), rows.weight_changes)
    cotangents, by_row = jax.vmap(pull)(cotangents)
    places = jnp.where(places == PADDING, len(examples.labels), places)
    return cotangents, sums.at[:, places].add(by_row, mode="drop")


def _outputs_with_derivative(outputs: Outputs, state: TrainState) -> tuple[Array, list[Array]]:
    """Return the outputs, and their derivatives by the floats of the state."""

    def of_floats(floats: list[Array]) -> Array:
        return outputs(with_floats(state, floats).evaluation_params)

    floats = floats_of(state)
    return of_floats(floats), jax.jacrev(of_floats)(floats)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def floats_of(state: TrainState) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(state) if _is_float(leaf)]


def with_floats(state: TrainState, floats: list[Array]) -> TrainState:
    remaining = iter(floats)
    return jax.tree.map(lambda leaf: next(remaining) if _is_float(leaf) else leaf, state)
