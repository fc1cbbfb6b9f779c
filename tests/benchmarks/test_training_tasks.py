"""The networks and their work, which the benchmarks write out for each library, are the same for any image size."""

import argparse
import math

import jax
import pytest
from flax import nnx

from benchmarks import per_example_gradients, training
from benchmarks.training_peers import flax_network, project_train_config
from benchmarks.training_tasks import (
    NUM_CLASSES,
    ModelName,
    Peer,
    Task,
    image_shape,
    make_data,
    matmul_shapes,
    suffix_of,
)
from gradtrail.core.nn.models import Model


@pytest.mark.parametrize("shape", [(28, 28), (32, 32, 3), (13, 20), (12, 17, 4)])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_networks_have_the_same_weights_and_their_matmuls(model: ModelName, shape: tuple[int, ...]) -> None:
    peer = Peer(loop="ours", model=model, batch_size=5, precision="float32")
    config = project_train_config(Task(peer=peer, examples=5, rounds=1, image_shape=shape))
    ours = Model(config.model_config(shape, NUM_CLASSES)).abstract_params()
    lesson = nnx.state(nnx.eval_shape(lambda: flax_network(model, shape)), nnx.Param)
    kernels = sorted(leaf.size for leaf in jax.tree.leaves(lesson) if leaf.ndim > 1)
    assert sorted(leaf.size for leaf in jax.tree.leaves(ours) if leaf.ndim > 1) == kernels

    # The gradient of a kernel is a product whose result is as large; the first layer has no gradient of its inputs.
    products = matmul_shapes(model, 5, shape)
    of_kernels = [products[1], *products[3::3]]
    assert sorted(rows * columns for rows, _, columns in of_kernels) == kernels
    assert len(products) == 3 * len(kernels) - 1


def test_images_have_the_shape_of_the_option_and_name_the_results_file() -> None:
    assert image_shape("32x48x3") == (32, 48, 3)
    images, labels = make_data(7, (32, 48, 3))
    assert (images.shape, labels.shape) == ((7, 32, 48, 3), (7,))
    assert (suffix_of((32, 48, 3)), suffix_of(image_shape("28x28"))) == ("-32x48x3", "")
    tasks = per_example_gradients.tasks(1, (32, 48, 3))
    assert {task.image_shape for task in tasks} == {(32, 48, 3)}
    assert f"MLP: {math.prod((32, 48, 3))}-256" in training.networks((32, 48, 3))


@pytest.mark.parametrize("text", ["32", "32x0", "32x32x3x1", "-1x28", "ax28", ""])
def test_other_texts_are_no_shape(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"^must be HEIGHTxWIDTH or HEIGHTxWIDTHxCHANNELS, got "):
        image_shape(text)
