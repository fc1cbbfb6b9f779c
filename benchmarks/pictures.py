"""Accuracy on pictures over seeds: emoji in nine unequal categories, by pictures a category, and Fashion-MNIST.

    python -m benchmarks.pictures [--data emoji-20,emoji-50,emoji-200,fashion] [--seeds 0,1,2,3,4] [--choose] [--start]

`gradtrail compare` trains the variants of `pictures` and `fashion` in `experiments.yaml`, in a clone of the last commit
for each data set. A third of each category of emoji, drawn once, are test pictures. With `--choose` a quarter of the
other ones is tested instead: choose params by that, so that the test pictures stay unseen. With `--start` the last
variant of `pictures` starts from its weights after a training on clip art too.

`npm` and `apt-get` download the pictures to `.gradtrail/benchmarks`, whose SHA-256 are verified. Out of scope: speed.
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
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML

from benchmarks.record import record
from gradtrail.experiments.compare.spec import PATH, Comparison, read_entries
from gradtrail.stages.common.params import PARAMS, changed
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.support.git import with_interpreter
from gradtrail.support.paths import private_folder
from gradtrail.support.significance import paired_difference

SPLIT_SEED, TEST_SHARE, CHOICE_SHARE = 0, 1 / 3, 1 / 4
SMALL = {"profile.largest_batch_size": 128, "train.keep_epochs": []}  # for the `dvc repro` with which `compare` begins
MORE_EPOCHS = {20: 3, 50: 2}  # times as many for so few pictures a category
LARGEST_SIDE, PICTURES, EPOCHS = 1_000, (25, 150), 30  # of clip art: pixels of a side, pictures of a subject, training
NPM = "npm pack --silent {package}", "tar -xf {archive} -C content"
APT = "apt-get download -qq {package}", "dpkg-deb -x {archive} content"
EMOJI = "emoji-datasource-google@16.0.0"  # Noto Emoji: Apache License 2.0
CLIP_ART = "openclipart-png=1:0.18+dfsg-19"  # public domain
FASHION = "dataset-fashion-mnist=0.0~git20200523.55506a9-1"  # MIT License
SHA256 = {  # of the archives of packages
    EMOJI: "fb5fd131b362aab7a55542d2a147a79708cce0a8b1c1bbacd470172708b5c438",
    CLIP_ART: "f07f1545a2970c2cf3fa339bc2405da1a95cf2b1827bfa05bf73eb1c20291c02",
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


def clip_art() -> Classes:
    """Return the small pictures of each subject, such as fruit, that has enough; links repeat others."""
    folder, subjects = unpacked(CLIP_ART) / "usr/share/openclipart/png", defaultdict(list)
    for path in folder.rglob("*.png"):
        sides = np.frombuffer(path.read_bytes(), ">u4", count=2, offset=16)  # in the header of a PNG file
        if not path.is_symlink() and sides.max() <= LARGEST_SIDE:
            subjects[" ".join(path.relative_to(folder).parts[:-1][:2])].append(path)
    return {name: paths for name, paths in subjects.items() if len(paths) >= PICTURES[0]}


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


def started(folder: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """Train on clip art; return the params of a training that starts from these weights."""
    images, changes = write_pictures(folder / "images", clip_art(), PICTURES[1]), {**params, "train.epochs": EPOCHS}
    run_in_clone(folder / "clone", {"IMAGES_DIR": images}, changes, {}, "dvc", "repro", "train")
    weights = folder / "clone/models/final.safetensors"
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    return {**params, "train.start.weights": str(weights), "train.start.sha256": sha256}


def show(results: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
    """Print a line for each variant: means over the seeds, and the gain over the variant before."""
    table = Table(caption="Means with 95 % intervals over the seeds; gains in balanced accuracy, paired by seed")
    for name in ("data", "variant", "seeds", "accuracy, %", "balanced, %", "gain, points", "minutes"):
        table.add_column(name, justify="left" if name in ("data", "variant") else "right")
    for data, rows in results.items():
        before: list[float] = []
        for variant, group in groupby(rows, lambda row: row["variant"]):
            runs = [*group]
            balanced = [float(run["test_balanced_accuracy"] or run["test_accuracy"]) for run in runs]
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
    parser.add_argument("--data", default="emoji-20,emoji-50,emoji-200,fashion", help="emoji-COUNT and fashion")
    parser.add_argument("--seeds", type=lambda text: [*map(int, text.split(","))], default=[*range(5)])
    parser.add_argument("--choose", action="store_true", help="test on a quarter of the training emoji")
    parser.add_argument("--start", action="store_true")
    options = parser.parse_args()
    entries, results = dict[str, Any](read_entries()), dict[str, list[Mapping[str, str]]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        if options.start:
            variants = entries["pictures"].variants
            label, params = [*variants.items()][-1]
            variants[f"{label}, from clip art"] = started(folder / "clip-art", params)
        for data in options.data.split(","):
            entry = entries["fashion" if data == "fashion" else "pictures"]
            if data == "fashion":
                source = {"FASHION_MNIST_DIR": unpacked(FASHION) / "usr/share/datasets/fashion-mnist"}
            else:
                count = int(data.removeprefix("emoji-"))
                entry = with_more_epochs(entry, MORE_EPOCHS.get(count, 1))
                source = {"IMAGES_DIR": write_pictures(folder / data, emoji(), count, is_choice=options.choose)}
            results[data] = compare(folder / f"clone-{data}", entry, options.seeds, source)
    show(results)
    record("pictures", results, options)


if __name__ == "__main__":
    main()
