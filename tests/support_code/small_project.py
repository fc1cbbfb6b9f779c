"""A small project of the real one's shape, whose stages take no time.

It has the real bookkeeping (states, runs, outs, params) under stages that only join strings, so that DVC's logic can be
tried many times over.
"""

import shutil
from pathlib import Path

from projects import COPIED, ROOT, Project, compiled_code, initialize
from ruamel.yaml import YAML
from warm_python import made_once

_SMALL_STAGE = '''
"""A stage that joins strings; it waits while `.git/hold` names it or is empty. OTHER_BYTES makes other outputs.

It runs `.git/before_reading.sh` and `.git/after_reading.sh`, if they exist, before and after it reads its data.
"""

from gradtrail.tracking.live import start_shipper

start_shipper(__name__)

import functools
import os
import subprocess
import time
from pathlib import Path

from gradtrail.core.{core} import WORD
from gradtrail.stages.common.pipeline_file import sections_of
from gradtrail.stages.common.stage import Stage, run_stage
from gradtrail.tracking.live import tracked

READS, PARAM, WRITES = {reads!r}, {param!r}, {writes!r}


def is_held(stage: str) -> bool:
    try:
        return Path(".git/hold").read_text() in ("", stage)
    except OSError:
        return False


def run_script(name: str) -> None:
    if Path(".git", name).exists():
        subprocess.run(["sh", f".git/{{name}}"], check=True)


def main(stage: Stage) -> None:
    params = sections_of(stage.inputs.entry.params)
    value = functools.reduce(dict.__getitem__, PARAM.split("."), params[stage.name])
    with tracked(stage) as run:
        while is_held(stage.name):
            time.sleep(0.01)
        run_script("before_reading.sh")
        words = [Path(name).read_text() for name in READS]
        run_script("after_reading.sh")
        with stage.writing_outs() as new:
            for name in WRITES:
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_text(" ".join([*words, WORD, str(value)[:4]]) + os.environ.get("OTHER_BYTES", ""))
            about = {{"dataset": "words", "dataset_digest": "0" * 64, "length": len(str(value))}}
            headlines = dict.fromkeys(("loss", "grad_norm_median"), len(str(value)))  # that a training's run shows
            stage.write_metrics(new, about | headlines)
        run.outs()


if __name__ == "__main__":
    run_stage(main, {name!r})
'''

# stage → files read, the key of its section that it reads, files written, core module imported
_SMALL_STAGES: dict[str, tuple[list[str], str, list[str], str]] = {
    "fetch": ([], "dataset", ["data/words.txt"], "first"),
    "train": (["data/words.txt"], "adamw.learning_rate", ["models/final.safetensors"], "second"),
    "evaluate": (["models/final.safetensors"], "calibration_bins", ["results/evaluate/words.txt"], "third"),
    "gradients": (["models/final.safetensors"], "top_fraction", ["results/gradients/words.txt"], "third"),
}


def finished_small_project() -> Project:
    """Return the small project whose pipeline ran once, with its results committed; to be copied, not to be changed."""
    return Project(made_once(_finish_small_project, "small"))


def _finish_small_project(folder: Path) -> None:
    project = make_small_project(folder)
    assert project.ran(project.dvc("repro")) == list(_SMALL_STAGES)
    project.commit("results")


def make_small_project(to: Path) -> Project:
    """Make the small project in a new folder under git and DVC."""
    shutil.copytree(compiled_code() / "src", to / "src")
    for name in COPIED:
        shutil.copy(ROOT / name, to)
    (to / "pipeline").mkdir()
    (to / "pipeline" / "__init__.py").touch()
    for name in ("stage.sh", "versions.yaml"):
        shutil.copy(ROOT / "pipeline" / name, to / "pipeline")
    stages = {}
    for name, (reads, param, writes, core) in _SMALL_STAGES.items():
        source = _SMALL_STAGE.format(name=name, reads=reads, param=param, writes=writes, core=core)
        (to / "pipeline" / f"{name}.py").write_text(source)
        (to / "src" / "gradtrail" / "core" / f"{core}.py").write_text(f"WORD = {core!r}\n")
        stages[name] = {
            "cmd": f"sh pipeline/stage.sh {name}",
            "deps": [*reads, f"pipeline/{name}.py", f"src/gradtrail/core/{core}.py"],
            "params": [name, {"pipeline/versions.yaml": ["numpy"]}],
            "outs": writes,
            "metrics": [{f"results/metrics/{name}.json": {"cache": False}}],
        }
    YAML().dump({"stages": stages}, to / "dvc.yaml")
    project = Project(to)
    project.change({"fetch.dataset": "digits", "runtime.system_metrics": False})
    return initialize(project)
