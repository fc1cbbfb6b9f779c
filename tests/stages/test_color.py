"""Color images go through the stages: trained, evaluated, exported, and scored by their gradients."""

import io
from pathlib import Path

import numpy as np
import pytest
from factories import NUM_CLASSES, color_split, dataset_info, make_engine, new_compiler, run_training, train_config
from mlflow.exceptions import MlflowException
from PIL import Image

from gradtrail.core.evaluate import EvaluateConfig
from gradtrail.core.export import ExportConfig
from gradtrail.core.nn.cnn import CNN
from gradtrail.core.nn.inference import compile_predict_within
from gradtrail.stages import evaluate
from gradtrail.stages.data.data_files import read_info, read_splits, write_processed
from gradtrail.stages.export import Network, write_export
from gradtrail.stages.model.exported import read_manifest
from gradtrail.stages.model.weights import WeightsInfo, read_members, read_weights, write_weights
from gradtrail.stages.report.gallery import encode_png
from gradtrail.tracking.models import describe_model
from gradtrail.tracking.pyfunc import _load_pyfunc

SHAPE = (12, 10)
SPLITS = {
    name: color_split(count, shape=SHAPE, seed=seed)
    for seed, (name, count) in enumerate({"train": 240, "validation": 60, "test": 90}.items())
}
CLASSES = ("sky", "temple", "flower")
CNN_ON_COLOR = CNN(
    channels=(8,), convolutions=1, kernel_size=3, norm="none", groups=2, hidden=(), activation="relu", dropout=0.0
)
CONFIG = train_config(model=CNN_ON_COLOR, optimizer="adamw", epochs=8, batch_size=16)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the splits and the weights of a training."""
    folder = tmp_path_factory.mktemp("color")
    info = write_processed(folder / "data", SPLITS, dataset_info(name="patches", image_shape=(*SHAPE, 3)))
    params = run_training(*make_engine(CONFIG, SPLITS["train"]))[-1].state.params
    network = CONFIG.model_config(info.image_shape, NUM_CLASSES)
    about = WeightsInfo(model=network, loss=CONFIG.loss, dataset=info, epoch=CONFIG.epochs)
    write_weights(folder / "final.safetensors", params, about)
    return folder


@pytest.fixture(scope="module")
def evaluation(project: Path) -> evaluate.MembersEvaluation:
    """The evaluation of these weights on the splits, both as they are on disk."""
    path = project / "final.safetensors"
    splits = read_splits(project / "data")
    config = EvaluateConfig(weights="final", batch_size=32, calibration_bins=5, num_mistakes=4)
    predict = compile_predict_within(read_weights(path)[0], config.batch_size, compiler=new_compiler())
    both = (splits["validation"], splits["test"])
    members = read_members({0: path}, read_info(project / "data"))
    predictions = evaluate.predict(predict, members, {0: path}, both)
    return evaluate.evaluate(predictions, both, config)


@pytest.fixture(scope="module")
def export(project: Path, evaluation: evaluate.MembersEvaluation) -> Path:
    model, params, about = read_weights(project / "final.safetensors")
    network = Network(
        model=model,
        members={0: params},
        weights="final",
        epochs=(about.epoch,),
        dataset=about.dataset.label,
        classes=CLASSES,
        temperature=evaluation.ensemble.temperature,
        validation_images=10,
    )
    write_export(project / "export", network, ExportConfig(name="patches", batch_sizes=(1, 32), precisions=()))
    return project / "export"


def test_a_cnn_learns_from_color(evaluation: evaluate.MembersEvaluation, tmp_path: Path) -> None:
    """Better than any classifier that knows only the frequency of the classes."""
    assert evaluation.ensemble.metrics()["accuracy_low"] > 0.6
    evaluate.draw_figures(tmp_path, evaluation, SPLITS["test"], "patches", 4, CLASSES)
    colors = np.asarray(Image.open(tmp_path / "mistakes.png").convert("RGB"), np.int64)
    assert np.ptp(colors, axis=2).max() > 30, "the gallery is in color"


def test_export_takes_color_images_and_answers_as_the_evaluation(
    export: Path, evaluation: evaluate.MembersEvaluation
) -> None:
    assert read_manifest(export).image_shape == (*SHAPE, 3)
    served, images = _load_pyfunc(str(export)), SPLITS["test"].images
    expected = evaluation.ensemble.probabilities
    for data, rows in ((images, expected), (images / 255, expected), (images[0].tolist(), expected[:1])):
        np.testing.assert_allclose(served.predict(data)["probabilities"], rows, rtol=1e-4, atol=1e-6)
    for wrong in (images[..., 0], images[..., :2], images[0, 0]):
        with pytest.raises(MlflowException, match=r"an array \(images, 12, 10, 3\) of whole numbers .*; got shape"):
            served.predict(wrong)
    assert "(images, 12, 10, 3), or one image (12, 10, 3), of integers" in describe_model("", "", read_manifest(export))


def test_the_report_has_color_images_as_they_are() -> None:
    image = SPLITS["test"].images[0]
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(encode_png(image)))), image)
