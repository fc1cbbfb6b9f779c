"""Small trainings, analyses and evaluations under `environment.processor: any`, and the digests of what they compute.

    python tests/support_code/known_bytes.py > tests/contracts/results/known_bytes.json

writes them again, as after an update of JAX; then the list of processors on which they were seen starts anew. Widths
are no multiples of a processor's vectors, so that the sums at the edges of its tiles are among what is compared.
"""

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from gradtrail.stages.common.environment import EnvironmentConfig, RuntimeConfig, adapt_variables
from gradtrail.stages.common.params import PARAMS, changed, load_section, validate
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.tracking.environment import machine_key

EXAMPLES, CLASSES, SHAPE = 700, 10, (28, 28)
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"mlp.hidden": [67, 45]},
    "cnn": {"cnn.channels": [13, 22]},
    "own": {},
}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{model}, float32": {"model": model, **sizes} for model, sizes in NETWORKS.items()},
    **{
        f"{model}, {precision}": {"model": model, "precision": precision, **NETWORKS[model]}
        for model in ("mlp", "cnn")
        for precision in ("bfloat16", "float16")
    },
    "mlp, two shards": {"shards": 2},
    "mlp, large batches": {"batch_size": 700},
    "mlp, private": {"privacy.enabled": True},
}
SCORED = ("mlp, float32", "cnn, float32")  # by the pass of the stage `gradients`


def known_bytes() -> dict[str, dict[str, str]]:
    """Return the digest of each array, by the name of what made it."""
    from gradtrail.stages.common.environment import set_cpu_devices, set_up_jax

    set_up_jax(load_section("environment", EnvironmentConfig), load_section("runtime", RuntimeConfig))
    set_cpu_devices(2)
    found = {name: {path: digest(array) for path, array in _train(name)} for name in VARIANTS}
    return found | {"evaluation": {name: digest(value) for name, value in _evaluate()}}


def digest(array: Any) -> str:
    """Return the start of the SHA-256 of an array's bytes."""
    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def _train(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a training, by path, and the scores of its examples."""
    import jax

    from gradtrail.core.gradients.passes import compile_passes
    from gradtrail.core.nn.losses import CROSS_ENTROPY
    from gradtrail.core.nn.models import Model
    from gradtrail.core.train import loop
    from gradtrail.core.train.config import TrainConfig
    from gradtrail.core.train.keys import keys_of
    from gradtrail.core.xla.compiler import Compiler

    few = {"epochs": 2, "batch_size": 100, "keep_epochs": [0]}
    config = validate(_section("train", few | VARIANTS[name]), TrainConfig, "train")
    model = Model(config.model_config(SHAPE, CLASSES))
    images, labels = _data()
    noise = {"noise_multiplier": 1.0} if config.privacy.enabled else {}
    compiler = Compiler(time.perf_counter)
    training = loop.TrainingFunctions(config, model, EXAMPLES, jax.local_devices(), **noise).compile(compiler)
    state = training.init(keys_of(config.seeds_of(config.seed)))
    for chunk in training.train(state, loop.on_device(images, labels, training.mesh), steps_per_call=100):
        state = chunk.state
    yield from _named(state.params)
    if name in SCORED:
        scores = compile_passes(model, CROSS_ENTROPY, compiler=compiler).score(
            state.params, images, labels, advance=lambda _: None
        )
        yield from _named(scores)


def _evaluate() -> Iterator[tuple[str, Any]]:
    """Yield the metrics of logits, by name: what NumPy and SciPy compute on the host."""
    import dataclasses

    import numpy as np

    from gradtrail.core.evaluate import evaluate_logits, fit_temperature

    images, labels = _data()
    logits = (images.reshape(EXAMPLES, -1)[:, :CLASSES].astype(np.float32) - 128) / 37
    temperature = fit_temperature(logits[None], labels)
    evaluation = evaluate_logits(logits, labels, temperature=temperature, calibration_bins=15)
    yield from _named(dataclasses.asdict(evaluation))


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    import jax

    yield from ((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree))


def _section(name: str, changes: Mapping[str, Any]) -> Any:
    return changed(read_yaml(PARAMS), {f"{name}.{key}": value for key, value in changes.items()})[name]


def _data() -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (EXAMPLES, *SHAPE), np.uint8), rng.integers(0, CLASSES, EXAMPLES, np.int32)


if __name__ == "__main__":
    adapt_variables()
    versions = {name: version(name) for name in ("jax", "jaxlib", "numpy", "scipy")}
    found = {"versions": versions, "digests": known_bytes(), "processors": [machine_key()]}
    json.dump(found, sys.stdout, indent=1, sort_keys=True)
