"""A sensible start is said for other data than MNIST, until another network is chosen."""

import pytest
from factories import dataset_info, train_config

from gradtrail.stages.train.advice import sensible_start


@pytest.mark.parametrize(
    ("name", "shape", "count", "advice"),
    [
        ("mnist", (28, 28), 55_000, ""),
        ("digits", (28, 28), 1_416, ""),
        ("fashion_mnist", (28, 28), 55_000, "grayscale images of 28 × 28; a sensible start is CNN train.epochs=20"),
        ("cifar10", (32, 32, 3), 45_833, "color images of 32 × 32; a sensible start is CNN train.epochs=20"),
        ("folder", (32, 32, 3), 300, "color images of 32 × 32; a sensible start is CNN train.epochs=100"),
        (
            "folder",
            (96, 128, 3),
            1_000_000,
            "color images of 96 × 128; a sensible start is CNN -S 'train.cnn.channels=[32,64,128,128]' train.epochs=10",
        ),
    ],
)
def test_start_suits_size_channels_and_number_of_examples(
    name: str, shape: tuple[int, ...], count: int, advice: str
) -> None:
    info = dataset_info(name=name, image_shape=shape, examples={"train": count})
    words = advice.replace("CNN", "-S train.model=cnn").replace(" train.epochs", " -S train.epochs")
    assert sensible_start(train_config(batch_size=128), info) == (f"train: {name} has {words}" if words else "")


def test_nothing_is_said_of_a_chosen_network() -> None:
    info = dataset_info(name="cifar10", image_shape=(32, 32, 3), examples={"train": 45_833})
    assert sensible_start(train_config(model="cnn", batch_size=128), info) == ""
