"""A sensible start is said for other data than MNIST, until another network is chosen."""

import pytest
from factories import dataset_info, train_config

from gradtrail.stages.train.advice import sensible_start

COLOR = "train.model=resnet {}train.normalization=channels train.augmentation.flip=true train.augmentation.crop={}"


@pytest.mark.parametrize(
    ("name", "shape", "count", "options"),
    [
        ("mnist", (28, 28), 55_000, ""),
        ("digits", (28, 28), 1_416, ""),
        ("fashion_mnist", (28, 28), 55_000, "train.model=cnn train.epochs=20"),
        (
            "folder",
            (96, 128),
            1_000_000,
            "train.model=cnn 'train.cnn.channels=[32,64,128,128]' train.epochs=10",
        ),
        ("cifar10", (32, 32, 3), 45_833, f"{COLOR.format('', 3)} train.epochs=20"),
        (
            "folder",
            (66, 64, 3),
            300,
            f"{COLOR.format('train.resnet.patch=2 ', 6)} train.batch_size=32 train.epochs=100",
        ),
        ("folder", (6, 224, 3), 300, f"{COLOR.format('', 0)} train.batch_size=32 train.epochs=100"),
        (
            "folder",
            (225, 224, 3),
            20_000,
            f"{COLOR.format('', 22)} train.epochs=50",
        ),
    ],
)
def test_start_suits_size_channels_and_number_of_examples(
    name: str, shape: tuple[int, ...], count: int, options: str
) -> None:
    info = dataset_info(name=name, image_shape=shape, examples={"train": count})
    kind, size = "color" if len(shape) == 3 else "grayscale", f"{shape[0]} × {shape[1]}"
    words = " ".join(f"-S {option}" for option in options.split())
    advice = f"train: {name} has {kind} images of {size}; a sensible start is {words}"
    assert sensible_start(train_config(batch_size=128), info) == (advice if options else "")


def test_nothing_is_said_of_a_chosen_network() -> None:
    info = dataset_info(name="cifar10", image_shape=(32, 32, 3), examples={"train": 45_833})
    assert sensible_start(train_config(model="cnn", batch_size=128), info) == ""
