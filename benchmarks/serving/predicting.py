"""The rate of `gradtrail predict --out` beside the evaluation's, in images per second.

    python -m benchmarks.serving.predicting [--images 60000] [--models mlp,cnn] [--rounds 5]

Both take the same images of the same network of random weights, in turn: the evaluation's forward pass over an array in
memory, in batches of `evaluate.batch_size`, and the whole of a batch prediction, from a file to a parquet file, once
the program is compiled. Files: a parquet file with pixels, one with PNGs, and a folder of PNGs. There are fewer PNGs,
since Pillow takes longer for one than the network. On a busy machine compare the processor time.
"""

import argparse
import contextlib
import functools
import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks.record import record
from benchmarks.serving.servers import ROOT, random_network
from gradtrail.core.export import ExportConfig
from gradtrail.core.nn import inference
from gradtrail.core.xla.compiler import Compiler
from gradtrail.serving import predict as predicting
from gradtrail.stages.common.yaml_file import read_yaml
from gradtrail.stages.export import write_export
from gradtrail.stages.model.exported import read_export

_ENCODED_SHARE = 10  # of the images are PNGs, one in so many


def write_sources(folder: Path, images: np.ndarray) -> dict[str, tuple[Path, int]]:
    """Write images in each form; return path and number of images."""
    fewer = images[: max(1, len(images) // _ENCODED_SHARE)]
    encoded = []
    for image in fewer:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png")
        encoded.append(file.getvalue())
    pq.write_table(pa.table({"image": encoded}), folder / "png.parquet", row_group_size=10_000)
    pixels = pa.array([image.tobytes() for image in images], pa.binary(images[0].size))
    pq.write_table(pa.table({"image": pixels}), folder / "pixels.parquet", row_group_size=10_000)
    (folder / "png").mkdir()
    for number, content in enumerate(encoded):
        (folder / "png" / f"{number:06d}.png").write_bytes(content)
    return {
        "parquet, pixels": (folder / "pixels.parquet", len(images)),
        "parquet, PNG": (folder / "png.parquet", len(fewer)),
        "folder of PNG": (folder / "png", len(fewer)),
    }


def measure(kind: str, num_images: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds and processor seconds per image of each round, of the evaluation and of each form."""
    network, rng = random_network(kind), np.random.default_rng(0)
    images = np.zeros((num_images, 28, 28), np.uint8)
    images[:, 4:24, 4:24] = rng.integers(0, 256, (num_images, 20, 20))  # a black edge, as of MNIST's
    size = read_yaml(ROOT / "params.yaml")["evaluate"]["batch_size"]
    predict = inference.compile_predict_within(network.model, size, compiler=Compiler(time.perf_counter))
    labels = np.zeros(num_images, np.int32)
    params = jax.device_put(network.members[0])
    times: dict[str, dict[str, list[float]]] = {}

    def note(name: str, count: int, action: Callable[[], object]) -> None:
        clocks = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}
        started = {key: clock() for key, clock in clocks.items()}
        action()
        for key, clock in clocks.items():
            times.setdefault(name, {}).setdefault(key, []).append((clock() - started[key]) / count)

    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nothing:  # noqa: PTH123
        folder = Path(name)
        config = ExportConfig(name="digits", batch_sizes=(1, 8, 32, 128), precisions=())
        write_export(folder / "export", network, config)
        model = read_export(folder / "export")
        model.compile(predicting.BATCH_SIZE)
        sources = write_sources(folder, images)
        for _ in range(rounds + 1):
            note("evaluation", num_images, functools.partial(predict, params, images, labels))
            with contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
                for form, (path, count) in sources.items():
                    note(form, count, functools.partial(predicting.predict_into, folder / "out.parquet", [path], model))
    return {name: {key: values[1:] for key, values in rows.items()} for name, rows in times.items()}  # after a warm-up


def show(kind: str, times: dict[str, dict[str, list[float]]]) -> None:
    """Print the fastest rounds, and their ratios to the evaluation's."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    table = Table(title=f"{kind} (load averages: {load}; {os.cpu_count()} cores)")
    for title in ("what", "images/s", "of the evaluation's", "per second of processor time", "of the evaluation's"):
        table.add_column(title, justify="left" if title == "what" else "right")
    for name, rows in times.items():
        cells = [name]
        for key, values in rows.items():
            best = min(values)
            cells += [f"{1 / best:,.0f}", f"{min(times['evaluation'][key]) / best:.2f}"]
        table.add_row(*cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60_000)
    parser.add_argument("--models", type=lambda names: names.split(","), default=["mlp", "cnn"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results = {}
    for kind in options.models:
        results[kind] = measure(kind, options.images, options.rounds)
        show(kind, results[kind])
    record("predicting", results, options)


if __name__ == "__main__":
    main()
