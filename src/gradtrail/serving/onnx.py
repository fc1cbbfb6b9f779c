"""`gradtrail export --onnx FILE`: the exported model for ONNX Runtime, converted by jax2onnx.

The conversion runs in an environment of its own, with `locks/onnx.lock` in front of the packages of this one: jax2onnx
requires an older orbax-checkpoint. It begins from the network itself, as StableHLO cannot be converted.
"""

import sys
import sysconfig
from pathlib import Path

import numpy as np

from gradtrail.stages.model.exported import read_export
from gradtrail.support.errors import UserError
from gradtrail.support.git import CommandError, run, uv
from gradtrail.support.paths import private_folder

LOCK = Path("locks/onnx.lock")
TOLERANCE = 1e-5  # largest difference between probabilities of ONNX Runtime and of the export, in float32
_NUM_CHECKED = 256  # test images that both classify


def export_onnx(out: Path) -> int:
    """Write the model of `models/export` as an ONNX file, after comparing its answers with those of the export.

    The file has the weights in it: input `images`, uint8 (batch, height, width[, channels]); output `probabilities`,
    float32.

    Raises:
        UserError: The environment cannot be made, or the model cannot be converted or answers differently; one line.
    """
    try:
        print(run([str(make_environment()), "-m", __name__, str(out)], seconds=None).decode().strip())
    except CommandError as error:
        raise UserError(f"{out}: {error}") from None
    return 0


def make_environment() -> Path:
    """Return the interpreter of an environment with the packages of `LOCK`, and behind them those of this one."""
    folder = private_folder() / "onnx" / sysconfig.get_python_version()
    python, installed = folder / "bin" / "python", folder / LOCK.name
    if not installed.exists() or installed.read_bytes() != LOCK.read_bytes():
        uv("venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
        uv("pip", "install", "--quiet", "--no-deps", "--require-hashes", "--python", str(python), "-r", str(LOCK))
        installed.write_bytes(LOCK.read_bytes())
    (site,) = folder.glob("lib/python*/site-packages")
    # Python follows no .pth files in a folder that one names, and the project's code is in one; `addsitedir` does
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (site / "behind.pth").write_text(line, encoding="utf-8")
    return python


def convert(out: Path) -> None:
    """Convert the evaluated network, and compare it with the export on test images; runs in the environment of ONNX."""
    import jax
    import onnx
    import onnxruntime
    from jax2onnx import to_onnx

    from gradtrail.core.export import forward, tensors
    from gradtrail.stages.common.files import atomic_file
    from gradtrail.stages.data import data_files
    from gradtrail.stages.export import read_network
    from gradtrail.stages.model.calibration import read_evaluated

    info = data_files.read_info(Path("data/processed"))
    network = read_network(read_evaluated(Path("results/evaluate"), Path("models")), info)
    if (precision := network.model.config.precision) != "float32":
        raise UserError(f"jax2onnx converts networks with train.precision float32 alone; this one has {precision}")
    weights = jax.device_put(tensors([*network.members.values()], network.temperature))
    function = forward(network.model, len(network.members), unrolled=True)
    images = jax.ShapeDtypeStruct(("batch", *network.model.config.image_shape), np.uint8)
    model = to_onnx(
        lambda images: function(weights, images),
        [images],
        model_name=network.model.config.name,
        input_names=["images"],
        output_names=["probabilities"],
    )
    onnx.checker.check_model(model)

    checked = np.asarray(data_files.read_split(Path("data/processed/test")).images[:_NUM_CHECKED])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (probabilities,) = session.run(None, {"images": checked})
    difference = np.abs(probabilities - read_export(Path("models/export")).predict(checked)).max()
    if not difference <= TOLERANCE:
        reason = (
            f"probabilities differ from those of models/export by {difference:.1e}, at most {TOLERANCE:g} is allowed"
        )
        raise UserError(f"{reason}; `dvc repro export` brings the export up to date")
    with atomic_file(out) as temporary:
        temporary.write_bytes(model.SerializeToString())
    print(f"{out}: {out.stat().st_size:,} bytes, differs from models/export by at most {difference:.1e}")


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
