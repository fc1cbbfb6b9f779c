"""Accuracy on pictures over seeds.

Data sets:

- mnist, mnist-cnn: MNIST, by recipes of `experiments.yaml`; the second by `cnn`, which takes half an hour
- emoji-COUNT: emoji in nine unequal categories, at most COUNT a category, by the variants of `pictures` in
  `experiments.yaml`
- digits-COUNT: scikit-learn's handwritten digits, COUNT a class, by a network from random weights and from those of a
  training on MNIST
- fashion: Fashion-MNIST, by ensembles of three networks of the recipe `fashion`

    python -m benchmarks.pictures [--data mnist,emoji-20,digits-20] [--seeds 0,1,2,3,4]

`gradtrail compare` trains all but the last in a clone of the last commit for each data set. A third of each class of
emoji and digits, drawn once, are test pictures. With `--choose` a quarter of the other ones is tested instead: choose
params by that, so that the test pictures stay unseen.

`npm` and `apt-get` download pictures to `.gradtrail/benchmarks`, whose SHA-256 are verified. Out of scope: speed.
"""

import argparse
import csv
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML
from sklearn.datasets import load_digits

from benchmarks.record import record
from gradtrail.experiments.compare.spec import PATH, Comparison, read_entries
from gradtrail.stages.common.params import PARAMS, changed
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.git import with_interpreter
from gradtrail.support.paths import private_folder
from gradtrail.support.significance import paired_difference

SPLIT_SEED, TEST_SHARE, CHOICE_SHARE = 0, 1 / 3, 1 / 4
SMALL = {"profile.largest_batch_size": 128, "train.keep_epochs": []}  # for the `dvc repro` with which `compare` begins
DATA = "mnist,mnist-cnn,emoji-20,emoji-50,emoji-200,digits-20,digits-50,digits-200,fashion"
MORE_EPOCHS = {20: 3, 50: 2}  # times as many for so few pictures a category
DIGITS = {"train.model": "cnn", "train.optimizer": "muon"}
SOURCE = {**DIGITS, "fetch.dataset": "mnist", "train.epochs": 3}  # of the weights that digits start from
TARGET = {"fetch.dataset": "folder", "fetch.pictures.size": [28, 28], "fetch.pictures.color": False}
RATE = 0.3  # `train.start.rate`
MEMBERS = 3  # of an ensemble
RECIPES = "mlp", "no_clipping", "bfloat16", "float16", "linear", "mlp_augmented"
NPM = "npm pack --silent {package}", "tar -xf {archive} -C content"
APT = "apt-get download -qq {package}", "dpkg-deb -x {archive} content"
EMOJI = "emoji-datasource-google@16.0.0"  # Noto Emoji: Apache License 2.0
FASHION = "dataset-fashion-mnist=0.0~git20200523.55506a9-1"  # MIT License
SHA256 = {  # of the archives of packages
    EMOJI: "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    FASHION: "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
}
Classes = Mapping[str, Sequence[Path]]  # name → its pictures


def unpacked(package: str) -> Path:
    """Return the folder with the content of a package, which is downloaded and verified the first time."""
    folder = private_folder() / "benchmarks" / SHA256[package]
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            download, unpack = NPM if "@" in package else APT
            subprocess.check_output(download.format(package=package).split(), cwd=name)
            (archive,) = Path(name).iterdir()
            if (sha256 := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256[package]:
                raise SystemExit(f"{archive.name}: SHA-256 is {sha256}, expected {SHA256[package]}")
            (content := Path(name, "content")).mkdir()
            subprocess.check_output(unpack.format(archive=archive.name).split(), cwd=name)
            content.rename(folder)
    print(f"{package}, SHA-256 {SHA256[package]}")
    return folder


def emoji() -> Classes:
    """Return the emoji of each category, without parts such as skin tones."""
    folder, categories = unpacked(EMOJI) / "package", defaultdict(list)
    for entry in json.loads((folder / "emoji.json").read_text(encoding="utf-8")):
        if entry["category"] != "Component":
            categories[entry["category"]].append(folder / "img/google/64" / entry["image"])
    return categories


def digits(folder: Path) -> Classes:
    """Write scikit-learn's digits, with margins as wide as those of MNIST, and return those of each class."""
    data, classes = load_digits(), defaultdict(list)
    folder.mkdir()
    for number, (image, label) in enumerate(zip(data.images, data.target, strict=True)):
        path = folder / f"{number:04}.png"
        Image.fromarray(np.pad(np.uint8(15 * image), 2)).save(path)  # values are 0 to 16
        classes[str(label)].append(path)
    return classes


def write_pictures(folder: Path, classes: Classes, count: int | None = None, *, is_choice: bool = False) -> Path:
    """Copy pictures to `train/<class>`, at most `count` of each class, and to `test/<class>`; return the folder.

    The order of a class is drawn once: the pictures of a smaller count are among those of a larger one, and the test
    pictures are the same. If `is_choice`, they are pictures that are else trained with.
    """
    rng = np.random.default_rng(SPLIT_SEED)
    for name, paths in sorted(classes.items()):
        train, test = list(rng.permutation(sorted(map(str, paths)))), list[str]()
        for share in (TEST_SHARE, CHOICE_SHARE) if is_choice else (TEST_SHARE,):
            num_test = round(share * len(train))
            test, train = train[:num_test], train[num_test:]
        for split, chosen in (("train", train[:count]), ("test", test)):
            (folder / split / name).mkdir(parents=True)
            for number, path in enumerate(chosen):  # pictures of a subject may share a name
                shutil.copy(path, folder / split / name / f"{number:04}-{Path(path).name}")
    return folder


def run_in_clone(
    folder: Path, data: Mapping[str, Path], params: Mapping[str, Any], entries: Mapping[str, Any], *arguments: str
) -> None:
    """Run Python in a new clone with other params and experiments; `data` are the variables that name its data."""
    subprocess.check_output(["git", "clone", "-q", ".", folder])
    YAML().dump(changed(read_yaml(PARAMS), params), folder / PARAMS)
    YAML().dump(entries, folder / PATH)
    env = with_interpreter() | {name: str(path) for name, path in data.items()} | {"PYTHONPATH": str(folder / "src")}
    subprocess.check_output([sys.executable, "-m", *arguments], cwd=folder, env=env)


def compare(folder: Path, entry: Comparison, seeds: Sequence[int], data: Mapping[str, Path]) -> list[Mapping[str, str]]:
    """Train the variants of an entry in a clone; return a row for each training."""
    entries = {entry.name: {"timed": True, "seeds": [*seeds], "variants": entry.variants}}
    run_in_clone(folder, data, entry.set | SMALL, entries, "gradtrail", "compare", entry.name)
    return [*csv.DictReader((folder / f"results/comparisons/{entry.name}.csv").read_text().splitlines())]


def with_more_epochs(entry: Comparison, factor: int) -> Comparison:
    """Return the entry with so many times as many epochs for every variant."""
    variants = {name: {**own, "train.epochs": factor * own["train.epochs"]} for name, own in entry.variants.items()}
    return replace(entry, variants=variants)


def digits_entry(folder: Path) -> Comparison:
    """Train on MNIST; return an entry with a training from random weights and one from these weights."""
    run_in_clone(folder, {}, SOURCE, {}, "dvc", "repro", "train")
    weights = folder / "models/final.safetensors"
    start = {"weights": str(weights), "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(), "rate": RATE}
    network = {**DIGITS, "train.batch_size": 32, "train.epochs": 60}
    started = network | {f"train.start.{key}": value for key, value in start.items()}
    return Comparison(name="digits", set=TARGET, variants={"cnn": network, "cnn, from MNIST": started})


def ensemble(folder: Path, entry: Comparison, seed: int, data: Mapping[str, Path]) -> dict[str, Any]:
    """Train an ensemble that shares no member with that of another seed; seconds are those of `dvc repro evaluate`."""
    params = entry.set | SMALL | {"train.members": MEMBERS, "train.seed": MEMBERS * seed}
    started = time.perf_counter()
    run_in_clone(folder, data, params, {}, "dvc", "repro", "evaluate")
    seconds = {"train_seconds": time.perf_counter() - started, "compile_seconds": 0.0}
    metrics = json.loads((folder / "results/metrics/evaluate.json").read_text(encoding="utf-8"))
    accuracies = {"test_accuracy": metrics["ensemble_accuracy"], "mean_test_accuracy": metrics["accuracy"]}
    return {"variant": f"{MEMBERS} networks", "seed": seed, **accuracies, **seconds}


def show(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Print a line for each variant: means over the seeds, and the gain over the variant before."""
    table = Table(caption="Means with 95 % intervals over the seeds; gains in balanced accuracy, paired by seed")
    for name in ("data", "variant", "seeds", "accuracy, %", "balanced, %", "gain, points", "minutes"):
        table.add_column(name, justify="left" if name in ("data", "variant") else "right")
    for data, rows in results.items():
        before: list[float] = []
        for variant, group in groupby(rows, lambda row: row["variant"]):
            runs = [*group]
            balanced = [float(run.get("test_balanced_accuracy") or run["test_accuracy"]) for run in runs]
            means = mean([float(run["test_accuracy"]) for run in runs]), mean(balanced), mean(balanced, before)
            seconds = (float(run["train_seconds"]) + float(run["compile_seconds"]) for run in runs)
            table.add_row(data, variant, str(len(runs)), *means, f"{statistics.median(seconds) / 60:.1f}")
            before = balanced
    Console(width=130).print(table)


def mean(shares: Sequence[float], baseline: Sequence[float] = ()) -> str:
    """Return the mean of shares, or of their differences to a baseline, in percent, with its interval."""
    found = paired_difference(shares, baseline or [0.0] * len(shares))
    return f"{100 * found.mean:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=DATA, help="names as above; the default is all")
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default=[*range(5)])
    parser.add_argument("--choose", action="store_true", help="test on a quarter of the training pictures")
    options = parser.parse_args()
    results = dict[str, Sequence[Mapping[str, Any]]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for data in options.data.split(","):
            entries, (kind, _, count) = dict[str, Any](read_entries()), data.partition("-")
            if kind == "fashion":
                source = {"FASHION_MNIST_DIR": unpacked(FASHION) / "usr/share/datasets/fashion-mnist"}
                for seed in options.seeds:
                    row = ensemble(folder / f"{data}-{seed}", entries["fashion"], seed, source)
                    results[data] = [*results.get(data, ()), row]
                    record(f"pictures-{data}", results[data], options)  # one takes ten minutes
            elif kind == "mnist":
                variants = {name: entries[name].set for name in ([count] if count else RECIPES)}
                results[data] = compare(folder / data, Comparison(name="mnist", variants=variants), options.seeds, {})
            else:
                if kind == "emoji":
                    classes, entry = emoji(), with_more_epochs(entries["pictures"], MORE_EPOCHS.get(int(count), 1))
                else:
                    classes, entry = digits(folder / f"source-{data}"), digits_entry(folder / f"mnist-{data}")
                images = write_pictures(folder / data, classes, int(count), is_choice=options.choose)
                results[data] = compare(folder / f"clone-{data}", entry, options.seeds, {"IMAGES_DIR": images})
            record(f"pictures-{data}", results[data], options)
    show(results)


if __name__ == "__main__":
    main()
