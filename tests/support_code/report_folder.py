"""A folder with everything that the report reads, small, and its page: what its tests start from."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image
from projects import ROOT

from gradtrail.core.data import Split
from gradtrail.stages.common.pipeline_file import read_pipeline, stages_before
from gradtrail.stages.common.yaml_file import parse_yaml, read_yaml
from gradtrail.stages.data.data_files import DatasetInfo, write_processed
from gradtrail.stages.dp.guarantee import PrivacyGuarantee, write_guarantee
from gradtrail.stages.model.calibration import write_rule
from gradtrail.stages.report.gallery import make_gallery
from gradtrail.stages.report.numbers import read_sources
from gradtrail.stages.report.page import ReportConfig, render

DIGEST = "ab" * 32
STAGES = stages_before("report", read_pipeline(ROOT / "dvc.yaml"))
METRICS: dict[str, dict[str, Any]] = parse_yaml(
    b"""
fetch: {bytes: 54950048, train_examples: 60000, test_examples: 10000}
preprocess: {train_examples: 55000, validation_examples: 5000, test_examples: 10000, noisy_labels: 0,
  pixel_mean: 0.13, pixel_std: 0.31}
train: {epochs: 3, steps: 1290, planned_steps: 1290, num_parameters: 235146, accuracy: 0.9991, best_epoch: 2,
  validation_accuracy: 0.9854, validation_loss: 0.145, best_validation_accuracy: 0.9856}
evaluate: {accuracy: 0.9859, accuracy_low: 0.9834, accuracy_high: 0.988, loss: 0.1413599, num_examples: 10000,
  num_mistakes: 141, expected_calibration_error: 0.0977636, expected_calibration_error_uncalibrated: 0.12,
  temperature: 0.61, epoch: 3}
export: {size_bytes: 951631, largest_difference: 2.384e-7}
gradients: {num_examples: 70000, grad_norm_median: 0.2, validation_grad_norm_median: 0.2, test_grad_norm_median: 0.2,
  rank_correlation_loss: 0.5, rank_correlation_margin: 0.5, rank_correlation_input_norm: 0.5,
  noise_scale_typical: 382509}
profile: {train_step_flops: 134147512, train_step_total_bytes: 48768084, predict_flops: 60417408}
""",
    "metrics",
)
STEP = {"flops": 134147512, "touched_bytes": 63031728, "total_bytes": 48768084, "hlo_instructions": 1358}
STEP |= {"temporary_bytes": 1881944, "hlo_fusions": 61, "data_dependent_loops": 0}
COSTS: dict[str, dict[str, Any]] = {
    "train": {"train_step": STEP},
    "evaluate": {},
    "export": {"forward": STEP},
    "gradients": {},
    "profile": {"train_step": STEP, "predict": STEP | {"flops": 60417408}},
}
TABLES = {
    "train/epochs": (
        "epoch,loss,cross_entropy,accuracy,validation_loss,validation_accuracy\n"
        "1,0.8,0.4,0.9,0.3,0.96\n3,0.5,0.1,0.99,0.2,0.98"
    ),
    "train/parameters": "parameter,shape,number\nlayers/0/bias,256,256\nall,,256",
    "evaluate/per_class": (
        "class,precision,recall,recall_low,recall_high,f1,auroc\n0,1,1,0.4,1,1,1\n5,0.5,0.6,0.2,0.9,0.55,0.8"
    ),
    "evaluate/calibration": "count,confidence,accuracy\n7,0.24,0\n9993,0.9,0.99",
    "evaluate/mistakes": "example_id,label,predicted,probability,loss\n2654,4,9,0.93,4.6",
    "gradients/noise_scale": "epoch,noise_scale,low,high,sharpness\n0,77.3,68,83,4.2\n3,382509,29519,inf,31",
    "gradients/largest": "split,example_id,label,predicted,grad_norm\ntest,720,5,3,26.8",
    "gradients/suspects": "split,example_id,label,predicted\ntrain,42566,9,4\ntest,1226,5,3",
    "gradients/classes": "class,share\n0,0.85\n1,-0.21",
    "profile/costs": (
        "function,precision,batch_size,remat,flops,touched_bytes,temporary_bytes,total_bytes,hlo_instructions,"
        "hlo_fusions,data_dependent_loops\ntrain_step,float32,128,False,134147512,19792592,1881944,48768084,1358,86,0\n"
        "train_step,bfloat16,128,False,134578128,20529056,1881944,48768084,1399,98,0\n"
        "train_step,float32,256,False,258000000,20529056,1881944,50000000,1399,98,0"
    ),
}
FIGURES = (
    *("preprocess/samples", "train/learning_curves", "train/steps", "evaluate/reliability", "profile/costs"),
    *(f"gradients/{name}" for name in ("histograms", "relations", "course", "classes")),
)
SUMMARY = "# Summary of per-example gradients: mlp-256-128\n\n## Noise\n\nThe gradient noise scale is 77.\n"
EXAMPLES = {  # split → (example_id, label, predicted)
    "train": [(7, 1, 1), (42566, 9, 4)],
    "validation": [(8, 2, 2)],
    "test": [(0, 0, 0), (720, 5, 3), (1226, 5, 3), (3, 1, 1), (2654, 4, 9)],
}


def make_report_folder(folder: Path) -> Path:
    """Write the files that the report reads, small."""
    for out in (out for spec in STAGES.values() for out in spec.outs):
        path = folder / out
        (path if not path.suffix else path.parent).mkdir(parents=True, exist_ok=True)
        if path.suffix:
            path.write_text(out)
    for stage, metrics in METRICS.items():
        write_metrics(folder, stage, metrics)
    for stage, costs in COSTS.items():
        (folder / f"results/costs/{stage}.json").write_text(json.dumps(costs))
    for name, text in TABLES.items():
        (folder / f"results/{name}.csv").write_text(f"{text}\n")
    for name in FIGURES:
        Image.new("L", (100, 50)).save(folder / f"results/{name}.png")
    (folder / "results/gradients/summary.md").write_text(SUMMARY)
    write_model(folder, "aaaa")
    write_examples(folder)
    (folder / "pipeline").mkdir()
    for name in ("dvc.yaml", "params.yaml", "pipeline/versions.yaml", "pipeline/corrections.csv"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def write_examples(folder: Path) -> None:
    """Write the splits, each example with an image of its own, and the tables with a row for each example."""
    info = DatasetInfo(name="mnist", digest=DIGEST, image_shape=(28, 28), num_classes=10, examples={}, files={})
    splits = {}
    for name, examples in EXAMPLES.items():
        example_id, labels, _ = (np.array(column, np.int32) for column in zip(*examples, strict=True))
        images = np.zeros((len(labels), 28, 28), np.uint8)
        images[np.arange(len(labels)), 5, 5 + np.arange(len(labels))] = 255
        same = dict.fromkeys(("labels", "true_labels", "given_labels", "corrected_labels"), labels)
        splits[name] = Split(images=images, example_id=example_id, **same)
    (folder / "data/processed").rmdir()
    write_processed(folder / "data/processed", splits, info)

    rows = [(name, *example) for name, examples in EXAMPLES.items() for example in examples]
    scores = pd.DataFrame(rows, columns=["split", "example_id", "label", "predicted"])
    scores = scores.assign(probability=0.1, grad_norm=np.linspace(1, 9, len(rows)))
    scores = scores.assign(suspicion=np.linspace(0, 0.9, len(rows)))
    scores.to_parquet(folder / "results/gradients/scores.parquet", index=False)
    test = scores[scores["split"] == "test"].assign(probability=np.linspace(0.5, 0.9, len(EXAMPLES["test"])))
    predictions = test[["example_id", "label", "predicted", "probability"]]
    predictions.to_parquet(folder / "results/evaluate/predictions.parquet", index=False)


def write_model(folder: Path, digest: str) -> None:
    """Write what `evaluate` writes of the weights that it evaluated, given their digest."""
    content = {"members": [{"weights": "models/final.safetensors", "weights_digest": digest}]}
    (folder / "results/evaluate/calibration.json").write_text(json.dumps(content))
    write_rule(folder / "results/evaluate")


def write_metrics(folder: Path, stage: str, metrics: dict[str, Any]) -> None:
    content = {"dataset": "mnist", "dataset_digest": DIGEST} | metrics
    (folder / f"results/metrics/{stage}.json").write_text(json.dumps(content))


def set_params(folder: Path, section: str, **values: Any) -> None:
    params = read_yaml(folder / "params.yaml")
    params[section] |= values
    (folder / "params.yaml").write_text(json.dumps(params))


def make_members(folder: Path) -> None:
    """Make the folder that of a training with three members."""
    ensemble = {"accuracy": 0.988, "accuracy_low": 0.9857, "accuracy_high": 0.99, "loss": 0.041, "temperature": 0.5}
    ensemble |= {"expected_calibration_error": 0.0025, "expected_calibration_error_uncalibrated": 0.11}
    spread = {"members": 3, "accuracy_sd": 0.0009, "loss_sd": 0.002, "validation_accuracy_sd": 0.0011}
    evaluated = METRICS["evaluate"] | spread | {f"ensemble_{key}": value for key, value in ensemble.items()}
    write_metrics(folder, "evaluate", evaluated)
    write_metrics(folder, "train", METRICS["train"] | spread | {"best_epoch": 2.67})
    rows = "".join(f"\n{seed},0.98{seed},0.05,0.01,0.6" for seed in range(3))
    path = folder / "results/evaluate/members.csv"
    path.write_text(f"seed,accuracy,loss,expected_calibration_error,temperature{rows}")
    set_params(folder, "train", members=3, vary=["order", "dropout"])


def make_private(folder: Path, guarantee: PrivacyGuarantee) -> None:
    """Make the folder that of a private training; without what is left out if it is to be published."""
    write_guarantee(folder / "results/train", guarantee)
    privacy = read_yaml(folder / "params.yaml")["train"]["privacy"]
    set_params(folder, "train", privacy=privacy | {"enabled": True, "release": guarantee.release})
    if guarantee.release:
        path = folder / "results/train/epochs.csv"
        pd.read_csv(path).assign(loss=None, cross_entropy=None, accuracy=None).to_csv(path, index=False)
        write_metrics(folder, "train", {key: value for key, value in METRICS["train"].items() if key != "accuracy"})
        public = ("num_examples", "validation_grad_norm_median", "test_grad_norm_median")
        write_metrics(folder, "gradients", {key: METRICS["gradients"][key] for key in public})
        for name in ("course", "classes"):
            (folder / f"results/gradients/{name}.png").unlink()
        suspects = folder / "results/gradients/suspects.csv"
        suspects.write_text(suspects.read_text().replace("train,42566,9,4\n", ""))


def render_page(folder: Path, title: str = "A title") -> str:
    """Return the page of a folder."""
    sources = read_sources(folder)
    return render(ReportConfig(title=title), sources, make_gallery(sources))
