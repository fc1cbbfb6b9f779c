"""A folder with everything that the report reads, small, and its page: what its tests start from."""

import json
import shutil
import struct
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from projects import ROOT
from ruamel.yaml import YAML

from gradtrail.core.data import Split
from gradtrail.stages.common.dataset import DatasetInfo, write_processed
from gradtrail.stages.common.pipeline_file import read_pipeline, stages_before
from gradtrail.stages.report import inputs, page

DIGEST = "ab" * 32
STEP = {"flops": 134147512, "touched_bytes": 63031728, "total_bytes": 48768084, "hlo_instructions": 1358}
STEP |= {"temporary_bytes": 1881944, "hlo_fusions": 61, "data_dependent_loops": 0}
COSTS: dict[str, dict[str, Any]] = {
    "train": {"train_step": STEP},
    "evaluate": {},
    "export": {"forward": STEP},
    "gradients": {},
    "profile": {
        "train_step": STEP | {"jaxpr_equations": 477},
        "predict": STEP | {"flops": 60417408},
    },
}

METRICS: dict[str, dict[str, Any]] = {
    "fetch": {"bytes": 54950048, "train_examples": 60000, "test_examples": 10000},
    "preprocess": {
        "train_examples": 55000,
        "validation_examples": 5000,
        "test_examples": 10000,
        "noisy_labels": 0,
        "pixel_mean": 0.13,
        "pixel_std": 0.31,
    },
    "train": {
        "epochs": 3,
        "steps": 1290,
        "planned_steps": 1290,
        "num_parameters": 235146,
        "accuracy": 0.9991,
        "validation_accuracy": 0.9854,
        "validation_loss": 0.145,
        "best_validation_accuracy": 0.9856,
        "best_epoch": 2,
    },
    "evaluate": {
        "accuracy": 0.9859,
        "accuracy_low": 0.9834,
        "accuracy_high": 0.988,
        "loss": 0.1413599,
        "num_examples": 10000,
        "num_mistakes": 141,
        "expected_calibration_error": 0.0977636,
        "expected_calibration_error_uncalibrated": 0.12,
        "temperature": 0.61,
        "epoch": 3,
    },
    "export": {"size_bytes": 951631, "largest_difference": 2.384e-7},
    "gradients": {
        **{f"{split}grad_norm_median": 0.2 for split in ("", "validation_", "test_")},
        **{f"rank_correlation_{name}": 0.5 for name in ("loss", "margin", "input_norm")},
        "num_examples": 70000,
        "noise_scale_typical": 382509,
    },
    "profile": {"train_step_flops": 134147512, "train_step_total_bytes": 48768084, "predict_flops": 60417408},
}
TABLES = {
    "train/epochs": (
        "epoch,loss,cross_entropy,accuracy,validation_loss,validation_accuracy\n"
        "1,0.8,0.4,0.9,0.3,0.96\n3,0.5,0.1,0.99,0.2,0.98"
    ),
    "train/parameters": "parameter,shape,number\nlayers/0/bias,256,256\nall,,256",
    "evaluate/classes": "label,predicted\n0,0\n5,3\n5,3\n1,1\n4,9",
    "evaluate/per_class": "class,precision,recall,f1\n0,1,1,1\n5,0.5,0.6,0.55",
    "evaluate/calibration": "count,confidence,accuracy\n7,0.24,0\n9993,0.9,0.99",
    "evaluate/calibration_uncalibrated": "count,confidence,accuracy\n10000,0.8,0.9859",
    "evaluate/mistakes": "example_id,label,predicted,probability,loss\n2654,4,9,0.93,4.6",
    "gradients/noise_scale": "epoch,noise_scale,low,high\n0,77.3,68,83\n3,382509,29519,inf",
    "gradients/largest": "split,example_id,label,predicted,grad_norm\ntest,720,5,3,26.8",
    "gradients/suspects": "split,example_id,label,predicted\ntrain,42566,9,4\ntest,1226,5,3",
    "gradients/classes": "class,share\n0,0.85\n1,-0.21",
    "gradients/influence": "test_example,label\n2654,6\n2654,6",
    "profile/costs": (
        "function,precision,batch_size,remat,flops,touched_bytes,temporary_bytes,total_bytes,hlo_instructions,"
        "hlo_fusions,data_dependent_loops\ntrain_step,float32,128,False,134147512,19792592,1881944,48768084,1358,86,0\n"
        "train_step,bfloat16,128,False,134578128,20529056,1881944,48768084,1399,98,0"
    ),
    "profile/doubling": "function,batch_size,doubled,flops,total_bytes\ntrain_step,64,128,1.93,0.99",
}
FIGURES = (
    *("preprocess/samples", "train/learning_curves", "train/steps"),
    *("evaluate/confusion", "evaluate/reliability", "evaluate/mistakes"),
    *(f"gradients/{name}" for name in ("histograms", "relations", "largest", "course", "classes", "influence")),
    *("gradients/suspects_train", "gradients/suspects_test", "profile/costs"),
)
SHOWN = (  # the other figures are drawn for `dvc plots` and MLflow
    *("preprocess/samples", "train/steps", "profile/costs"),
    *(f"gradients/{name}" for name in ("histograms", "relations", "course", "classes", "influence")),
)
VOID = {"meta", "link", "img", "br", "hr", "input", "col", "wbr"}
STAGES = stages_before("report", read_pipeline(ROOT / "dvc.yaml"))
SUMMARY = "# Summary of per-example gradients: mlp-256-128\n\n## Noise\n\nThe gradient noise scale is 77.\n"
EXAMPLES = {  # split → (example_id, label, predicted)
    "train": [(7, 1, 1), (42566, 9, 4)],
    "validation": [(8, 2, 2)],
    "test": [(0, 0, 0), (720, 5, 3), (1226, 5, 3), (3, 1, 1), (2654, 4, 9)],
}


def make_report_folder(folder: Path) -> Path:
    """Write the files that the report reads, small."""
    info = DatasetInfo(name="mnist", digest=DIGEST, image_shape=(28, 28), num_classes=10, examples={}, files={})
    shutil.copy(ROOT / "dvc.yaml", folder)
    for stage, spec in STAGES.items():
        for out in spec.outs:
            path = folder / out
            (path if not path.suffix else path.parent).mkdir(parents=True, exist_ok=True)
            if path.suffix == ".safetensors":
                path.write_text(out)
        write_metrics(folder, stage, METRICS[stage])
    for stage, costs in COSTS.items():
        (folder / f"results/costs/{stage}.json").write_text(json.dumps(costs))
    (folder / "data/processed").rmdir()
    write_processed(folder / "data/processed", {name: a_split(name) for name in EXAMPLES}, info)
    for name in ("dynamics", "steps"):
        (folder / f"results/train/{name}.parquet").write_text(name)
    for name, text in TABLES.items():
        (folder / "results" / f"{name}.csv").write_text(f"{text}\n")
    for number, name in enumerate(FIGURES):
        (folder / "results" / f"{name}.png").write_bytes(a_png(number))
    (folder / "results/evaluate/calibration.json").write_text("{}")  # whose digest `export` names
    write_scores(folder)
    (folder / "results/gradients/summary.md").write_text(SUMMARY)
    (folder / "pipeline").mkdir()
    for name in ("params.yaml", "pipeline/versions.yaml", "pipeline/corrections.csv"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def a_split(name: str) -> Split:
    """A split of the examples above, each with an image of its own."""
    example_id, labels, _ = (np.array(column, np.int32) for column in zip(*EXAMPLES[name], strict=True))
    images = np.zeros((len(labels), 28, 28), np.uint8)
    images[np.arange(len(labels)), 5, 5 + np.arange(len(labels))] = 255
    same = dict.fromkeys(("labels", "true_labels", "given_labels", "corrected_labels"), labels)
    return Split(images=images, example_id=example_id, **same)


def write_scores(folder: Path) -> None:
    """Write the tables with a row for each example."""
    rows = [(name, *example) for name, examples in EXAMPLES.items() for example in examples]
    scores = pd.DataFrame(rows, columns=["split", "example_id", "label", "predicted"])
    scores = scores.assign(true_label=scores["label"], probability=0.1, grad_norm=np.linspace(1, 9, len(rows)))
    scores = scores.assign(suspicion=np.linspace(0, 0.9, len(rows)))
    scores.to_parquet(folder / "results/gradients/scores.parquet", index=False)
    test = scores[scores["split"] == "test"].assign(probability=np.linspace(0.5, 0.9, len(EXAMPLES["test"])))
    predictions = test[["example_id", "label", "predicted", "probability"]]
    predictions.to_parquet(folder / "results/evaluate/predictions.parquet", index=False)


def a_png(number: int) -> bytes:
    """The beginning of a PNG of 100 × 50 pixels, which is all that is read of one."""
    return b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">IIB", 100, 50, number)


def write_metrics(folder: Path, stage: str, metrics: dict[str, Any]) -> None:
    content = {"dataset": "mnist", "dataset_digest": DIGEST} | metrics
    (folder / f"results/metrics/{stage}.json").write_text(json.dumps(content))


def load_params(folder: Path) -> dict[str, Any]:
    params: dict[str, Any] = YAML(typ="safe", pure=True).load(folder / "params.yaml")
    return params


def set_param(folder: Path, section: str, key: str, value: Any) -> None:
    params = load_params(folder)
    params[section][key] = value
    (folder / "params.yaml").write_text(json.dumps(params))


def render(folder: Path, title: str = "A title") -> str:
    """Return the page of a folder."""
    sources = inputs.read_sources(folder)
    return page.render(page.ReportConfig(title=title), sources, page.make_content(sources))


class Reader(HTMLParser):
    """Reads a page as strictly as a person who wrote every tag: each is closed, by its own name."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """The attributes of each tag of that name."""
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def words(self) -> str:
        """What a person reads, with single spaces."""
        return " ".join(" ".join(self.text).split())
