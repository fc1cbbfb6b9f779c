"""A model of color images: `gradtrail predict` and the server take its images and answer with the names of classes."""

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exports import write_small_export
from in_memory_server import application, inference, probabilities
from PIL import Image
from rich.console import Console

from gradtrail.serving import predict as predicting
from gradtrail.serving.predict import predict
from gradtrail.stages.model.exported import ExportedModel, read_export

SHAPE = (12, 10, 3)
CLASSES = tuple(rf"[{letter}]$\frac$" for letter in "abcdefghij")  # no markup of Rich, no formula of Matplotlib
IMAGES = np.random.default_rng(0).integers(0, 256, (21, *SHAPE), dtype=np.uint8)


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "export"
    about = {"classes": CLASSES, "dataset": "folder 1234abcd"}
    return write_small_export(folder, image_shape=SHAPE, model="cnn", batch_sizes=(1, 8), **about)


@pytest.fixture
def model(export: Path) -> ExportedModel:
    return read_export(export)


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


async def test_server_answers_color_images_with_the_names_of_classes(export: Path, model: ExportedModel) -> None:
    app, expected = application(), model.predict(IMAGES)
    app.router.swap(await app.router.load(export))
    about = (await app.get("/v2/models/digits")).json
    assert about["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, *SHAPE]}]
    assert about["parameters"]["classes"] == [*CLASSES]
    reply = await app.post("/v2/models/digits/infer", inference(IMAGES))
    np.testing.assert_allclose(probabilities(reply), expected, rtol=1e-5)
    for images in (IMAGES, IMAGES[0], IMAGES / 255):
        reply = await app.post("/invocations", {"inputs": images.tolist()})
        labels = reply.json["predictions"]["label"]
        np.testing.assert_array_equal(labels, expected.argmax(axis=1)[: len(labels)])
    reply = await app.post("/picture", png(IMAGES[0]))
    assert reply.json["image"] == IMAGES[0].tolist()
    assert reply.json["classes"][reply.json["label"]] == CLASSES[expected[0].argmax()]
    reply = await app.post("/v2/models/digits/infer", inference(IMAGES[..., 0]))
    assert reply.status == 400
    assert reply.json["error"].startswith("inputs[0].shape: must be [images, 12, 10, 3], got [21, 12, 10]")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., io.StringIO]:
    """Make `predict` print on a terminal of so many columns and colors; returns its output."""

    def make(colors: str, width: int = 80) -> io.StringIO:
        output = io.StringIO()
        console = Console(file=output, force_terminal=True, color_system=colors, width=width, legacy_windows=False)  # type: ignore[arg-type]
        monkeypatch.setattr(predicting, "stdout_console", lambda: console)
        return output

    return make


def test_predict_draws_the_image_in_color_and_names_the_class(
    export: Path, terminal: Callable[..., io.StringIO], tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png(IMAGES[0]))
    output = terminal("truecolor")
    assert not predict([tmp_path / "a.png"], str(export), tmp_path, figure=tmp_path / "figure.png")
    text = output.getvalue()
    for row in range(0, 12, 2):
        for column in range(10):
            upper, lower = (";".join(map(str, IMAGES[0, each, column])) for each in (row, row + 1))
            assert f"\x1b[38;2;{upper};48;2;{lower}m▀" in text.splitlines()[row // 2]
    label = read_export(export).predict(IMAGES[:1]).argmax()
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert f"a.png: {CLASSES[label]}  " in plain
    drawn = np.asarray(Image.open(tmp_path / "figure.png").convert("RGB"), int)
    assert np.ptp(drawn, axis=2).max() > 100, "the figure is in color"


def test_image_is_drawn_within_the_width_and_colors_of_the_terminal(terminal: Callable[..., io.StringIO]) -> None:
    wide = np.zeros((30, 100, 3), np.uint8)
    wide[..., 0] = 255
    for colors, width, expected in (("256", 100, 100), ("256", 40, 34), ("standard", 80, 50)):
        output = terminal(colors, width)
        predicting._print_image(wide, predicting.stdout_console())
        lines = output.getvalue().splitlines()
        assert [line.count("▀") for line in lines] == [expected] * len(lines)
        assert ("196" in lines[0]) == (colors == "256"), "red, or its luminance"
