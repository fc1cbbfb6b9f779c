"""The data sets for `fetch.dataset`. To add one, add an entry to `DATASETS`, see `docs/data.md`."""

import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gradtrail.stages.data.data_files import RawArrays


@dataclass(frozen=True, kw_only=True)
class Framing:
    """The scaling of a data set's images: bright ink on black, with its proportions kept."""

    share: float  # share of the frame's side that the longer side of the ink takes
    by_mass: bool  # True if its centre of mass is in the middle of the frame, else the middle of its extent


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """An entry of the catalog: the content of a data set and its sources.

    It needs `load`, or else a `folder_variable`; folder, mirrors and OpenML are tried in this order.
    """

    title: str  # name in messages and in the report
    citation: str = ""
    # SHA-256 of the uncompressed bytes of each file: training images and labels, test images and labels; hexadecimal.
    # None if any four IDX files will do
    sha256: tuple[str, str, str, str] | None = None
    # SHA-256 of each file as it is published, `.gz`, if that of its content is not known: of the archive, or of the
    # four IDX files in the order above
    packed_sha256: tuple[str, ...] = ()
    archive: str = ""  # name, without `.gz`, of a tar file that is published in place of four IDX files
    read_archive: Callable[[Path], RawArrays] | None = None
    num_train: int = 0
    image_shape: tuple[int, ...] = (28, 28)  # height and width in pixels, of color images also the number of channels
    framing: Framing | None = None  # framing of the images; None if it is unknown
    load: Callable[[], RawArrays] | None = None  # function that returns the four arrays from an installed package
    folder_variable: str = ""  # environment variable that may name a folder with the files, each plain or as `.gz`
    folder_content: str = "a folder with the four IDX files"  # value of that variable, for messages
    mirrors: tuple[str, ...] = ()  # base URLs that serve each file as `<base>/<name>.gz`
    openml: str = ""  # name of version 1 of the data set at OpenML, where the test examples follow the training ones
    class_names: tuple[str, ...] = ()  # names of the classes, in order; empty if the numbers are the names
    stand_in: str = ""  # the data set that `make repro` uses if no source answers


def load_digits() -> RawArrays:
    """Return training images and labels, and test images and labels, of 1,797 handwritten digits.

    Images are enlarged from 8 x 8 to 20 x 20 and centred in 28 x 28, as MNIST's are. Every 7th image of each class is a
    test image, and the order is kept. All arithmetic is on integers: every machine makes the same bytes.
    """
    from sklearn import datasets  # late: the import takes half a second

    bunch = datasets.load_digits()
    images, labels = _enlarge(bunch.images.astype(np.int64)), bunch.target.astype(np.uint8)
    is_test = np.zeros(labels.shape, np.bool_)
    for label in np.unique(labels):
        is_test[np.flatnonzero(labels == label)[6::7]] = True
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


def _enlarge(images: np.ndarray) -> np.ndarray:
    """Resize (batch, 8, 8) of 0..16 to 20 x 20 of 0..255, bilinear, and pad it to (batch, 28, 28)."""
    # Where the centres of 20 pixels lie among those of 8: steps of 0.4, so that every weight is a tenth.
    centres = (np.arange(20) + 0.5) * 8 / 20 - 0.5
    weights = np.stack([np.interp(centres, np.arange(8), unit) for unit in np.eye(8)], axis=1)
    tenths = np.rint(10 * weights).astype(np.int64)
    hundredths = tenths @ images @ tenths.T  # 0..1600
    scaled = (2 * 255 * hundredths + 1600) // (2 * 1600)  # rounded, halves up
    return np.pad(scaled.astype(np.uint8), ((0, 0), (4, 4), (4, 4)))


def read_cifar(path: Path) -> RawArrays:
    """Return the arrays of CIFAR-10's binary version: in each record a label, then the pixels, channels first."""
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    with tarfile.open(path, "r:") as archive:
        files = [archive.extractfile(f"cifar-10-batches-bin/{name}.bin") for name in names]
        *train, test = [np.frombuffer(file.read(), np.uint8).reshape(-1, 1 + 3 * 32 * 32) for file in files if file]

    def split(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return np.ascontiguousarray(images), records[:, 0]

    return *split(np.concatenate(train)), *split(test)


DATASETS = {
    "mnist": Dataset(
        title="MNIST",
        citation='Y. LeCun, C. Cortes, C. J. C. Burges: "The MNIST database of handwritten digits", 1998',
        num_train=60_000,
        sha256=(
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
        framing=Framing(share=20 / 28, by_mass=True),
        folder_variable="MNIST_DIR",
        mirrors=(
            "https://storage.googleapis.com/cvdf-datasets/mnist",
            "https://ossci-datasets.s3.amazonaws.com/mnist",
        ),
        openml="mnist_784",
        stand_in="digits",
    ),
    "digits": Dataset(
        title="scikit-learn's digits",
        citation='E. Alpaydin, C. Kaynak: "Optical recognition of handwritten digits", UCI repository, 1998',
        num_train=1_545,
        sha256=(
            "920fe11b75cb551d40fc31258777d059eaee843f2ad7a3f59a3ea79b7d6c1c33",
            "11d2b149fffda13625e0bc29d53cdafb2efa08a55440b0fa1b12cc41c769eb64",
            "fb5102a9e7f67adc2216355874b1579c7f406d6c6bf03a890d540e7f059179e6",
            "4bf083685eb49dcad887ac0ff9d0d8a2072fab86c5dd9acaa45b0e326bcec3e3",
        ),
        framing=Framing(share=20 / 28, by_mass=False),
        load=load_digits,
    ),
    "fashion_mnist": Dataset(
        title="Fashion-MNIST",
        citation='H. Xiao, K. Rasul, R. Vollgraf: "Fashion-MNIST: a novel image dataset for benchmarking machine '
        'learning algorithms", arXiv:1708.07747, 2017',
        num_train=60_000,
        # Of what the published `.gz` files hold, whose MD5 the publishers give (README of zalandoresearch/
        # fashion-mnist: 8d4fb7e6..., 25c81989..., bef4ecab..., bb300cfd...) and TensorFlow Datasets the SHA-256
        # (url_checksums/fashion_mnist.txt: 3aede38d..., a04f1713..., 346e55b9..., 67da17c7...).
        sha256=(
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
        framing=Framing(share=1.0, by_mass=False),
        folder_variable="FASHION_MNIST_DIR",
        mirrors=(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        ),
        class_names=(
            *("T-shirt", "Trousers", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
    ),
    "kmnist": Dataset(
        title="KMNIST",
        citation='T. Clanuwat, M. Bober-Irizar, A. Kitamoto, A. Lamb, K. Yamamoto, D. Ha: "Deep learning for classical '
        'Japanese literature", arXiv:1812.01718, 2018',
        num_train=60_000,
        # TensorFlow Datasets (url_checksums/kmnist.txt); the MD5 in torchvision (datasets/mnist.py) are of these files
        packed_sha256=(
            "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
            "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
            "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
            "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
        ),
        framing=Framing(share=1.0, by_mass=False),
        folder_variable="KMNIST_DIR",
        folder_content="a folder with the four IDX files, as `.gz`",
        mirrors=(
            "https://codh.rois.ac.jp/kmnist/dataset/kmnist",
            "http://codh.rois.ac.jp/kmnist/dataset/kmnist",
        ),
        class_names=("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    ),
    "cifar10": Dataset(
        title="CIFAR-10",
        citation='A. Krizhevsky: "Learning multiple layers of features from tiny images", 2009',
        num_train=50_000,
        # TensorFlow Datasets (url_checksums/cifar10.txt); the publisher's page has MD5 c32a1d4ab5d03f1284b67883e8d87530
        packed_sha256=("c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",),
        archive="cifar-10-binary.tar",
        read_archive=read_cifar,
        image_shape=(32, 32, 3),
        folder_variable="CIFAR10_DIR",
        folder_content="a folder with cifar-10-binary.tar.gz",
        mirrors=("https://www.cs.toronto.edu/~kriz",),
        class_names=(
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
    ),
    "idx": Dataset(title="IDX files", folder_variable="IDX_DIR"),
    "folder": Dataset(
        title="folder of images",
        folder_variable="IMAGES_DIR",
        folder_content="a folder that has one folder of images per class",
    ),
    "csv": Dataset(
        title="images of a CSV file",
        folder_variable="IMAGES_CSV",
        folder_content="a CSV file with the columns path and label",
    ),
}


def title(dataset: str) -> str:
    """Return the title of a data set, such as `MNIST`; for one without an entry its name."""
    return DATASETS[dataset].title if dataset in DATASETS else dataset


def stands_in_for(dataset: str) -> str:
    """Return the name of the data set that this one stands in for; empty if there is none."""
    return next((name for name, entry in DATASETS.items() if dataset and entry.stand_in == dataset), "")
