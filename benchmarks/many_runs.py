"""What a store with many runs costs: seconds of the commands that people type, at several numbers of trainings.

    python -m benchmarks.many_runs [--trainings 250,1000] [--rounds 5]

Works in a clone of this repository in a temporary folder, on the results that DVC's cache has (run `dvc repro` first).
Each training is a commit whose `dvc.lock` has another seed and other digests of the weights, and a run in the store
with the params, metrics and tags of a real one, as have the stages below it. Times are medians of the rounds; pages of
MLflow's UI are timed once, in Chromium, from the request to the last row of the table, or of the comparison.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support_code"))

from browser import CHROMIUM, browser
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML
from servers import free_port

from benchmarks.record import record
from benchmarks.tracking import Clone, make_clone
from gradtrail.stages.common.pipeline_file import TRAIN, StageSpec, parse_pipeline
from gradtrail.tracking.state import RecordedState, Snapshot
from gradtrail.tracking.tags import output_tags, state_tags

STAGES = (TRAIN, "evaluate", "gradients", "profile")
FIRST_SEED = 1000
COMPARED = 100  # runs on one page
_ANY_SEED = 123456789
ROWS = ("tags", "params", "metrics", "latest_metrics")  # tables with a row for each key of a run
Content = dict[str, Any]


def other_locks(clone: Clone, seeds: range) -> tuple[dict[int, Content], list[str]]:
    """Return the lock of a training with each seed, and of the stages that read its weights, as values and as text."""
    path = clone.folder / "dvc.lock"
    content = YAML(typ="safe").load(path)
    stages = {name: section for name, section in content["stages"].items() if name not in ("export", "report")}
    stages[TRAIN]["params"]["params.yaml"][TRAIN]["seed"] = _ANY_SEED
    outs = [entry["md5"].removesuffix(".dir") for name in STAGES for entry in stages[name]["outs"]]
    YAML().dump(content | {"stages": stages}, path)
    templates = json.dumps(stages), path.read_text()
    subprocess.run(["git", "checkout", "dvc.lock"], cwd=clone.folder, check=True, capture_output=True)

    def changed(template: str, seed: int) -> str:
        others = {md5: hashlib.md5(f"{md5}{seed}".encode(), usedforsecurity=False).hexdigest() for md5 in outs}
        others[str(_ANY_SEED)] = str(seed)
        return re.sub("|".join(others), lambda match: others[match[0]], template)

    values = {seed: json.loads(changed(templates[0], seed)) for seed in seeds}
    return values, [changed(templates[1], seed) for seed in seeds]


def commit_locks(clone: Clone, texts: Iterable[str]) -> None:
    """Commit each lock, one after the other, to a branch."""
    has_branch = (clone.folder / ".git/refs/heads/many").exists()
    stream = []
    for number, text in enumerate(texts):
        stream.append(f"commit refs/heads/many\ncommitter a <a@b> {1_700_000_000 + number} +0000\ndata 4\nseed\n")
        if number == 0:
            stream.append(f"from {'refs/heads/many^0' if has_branch else 'HEAD^0'}\n")
        stream.append(f"M 100644 inline dvc.lock\ndata {len(text.encode())}\n{text}\n")
    command = ["git", "fast-import", "--quiet"]
    subprocess.run(command, cwd=clone.folder, input="".join(stream).encode(), check=True)


def add_runs(store: sqlite3.Connection, pipeline: dict[str, StageSpec], locks: Mapping[int, Content]) -> None:
    """Copy the run of each stage for each lock, with the tags of its state."""
    templates = {
        stage: store.execute(
            "select r.run_uuid from runs r join tags t on t.run_uuid = r.run_uuid "
            "where t.key = 'stage' and t.value = ? and r.lifecycle_stage = 'active'",
            (stage,),
        ).fetchone()[0]
        for stage in STAGES
    }
    store.row_factory = sqlite3.Row
    rows = {
        stage: dict(store.execute("select * from runs where run_uuid = ?", (run,)).fetchone())
        for stage, run in templates.items()
    }
    parts = {
        (stage, table): [dict(row) for row in store.execute(f"select * from {table} where run_uuid = ?", (run,))]  # noqa: S608
        for stage, run in templates.items()
        for table in ROWS
    }
    for number, (seed, lock) in enumerate(locks.items()):
        snapshot, parent = Snapshot(pipeline=pipeline, lock=lock), ""
        for stage in STAGES:
            identity, run = RecordedState(stage, snapshot=snapshot), uuid.uuid4().hex
            parent = parent or run
            began = 1_700_000_000_000 + 60_000 * number
            row = rows[stage] | {
                "run_uuid": run,
                "name": f"seed {seed} {stage}",
                "start_time": began,
                "end_time": began + 20_000,
            }
            row["artifact_uri"] = row["artifact_uri"].replace(templates[stage], run)
            _insert(store, "runs", row)
            tags = state_tags(identity) | output_tags(identity, identity.out_digests())
            tags |= {"mlflow.parentRunId": parent} if stage != TRAIN else {}
            for table in ROWS:
                for part in parts[stage, table]:
                    values = part | {"run_uuid": run}
                    if table == "tags":
                        values["value"] = tags.get(part["key"], part["value"])
                    if table == "params" and part["key"] == "train.seed":
                        values["value"] = str(seed)
                    if table in ("metrics", "latest_metrics"):
                        values["value"] = part["value"] * (1 + 0.001 * (seed % 17))
                    _insert(store, table, values)
    store.commit()


def _insert(store: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> None:
    marks = ", ".join("?" for _ in row)
    store.execute(f"insert into {table} ({', '.join(row)}) values ({marks})", [*row.values()])  # noqa: S608


def fill(clone: Clone, seeds: range) -> None:
    """Add trainings with these seeds to the history and to the store."""
    pipeline = parse_pipeline(YAML(typ="safe").load(clone.folder / "dvc.yaml"), "dvc.yaml")
    locks, texts = other_locks(clone, seeds)
    commit_locks(clone, texts)
    with closing(sqlite3.connect(clone.folder / "mlflow.db")) as store:
        add_runs(store, pipeline, locks)
    (clone.folder / ".gradtrail" / "synced.json").unlink(missing_ok=True)


def measure_ui(clone: Clone, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the name of each page of MLflow's UI, and the seconds from its request until its last part is drawn."""
    port = free_port()
    command = [sys.executable, "-m", "gradtrail", "ui", "--port", str(port)]
    env = os.environ | {"PYTHONPATH": str(clone.folder / "src"), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=clone.folder, env=env, stdout=subprocess.PIPE, text=True) as ui:
        try:
            address = next(match[0] for line in ui.stdout or () if (match := re.search(r"http://\S+", line)))
            compared, is_compared = comparison(clone)
            pages = {
                "runs in MLflow's UI": ("", _LAST_ROW),
                f"{COMPARED} runs compared in MLflow's UI": (compared, is_compared),
            }
            with browser(folder / "profile") as page:
                page.size(1440, 900)
                for name, (link, is_drawn) in pages.items():
                    for _ in range(2):  # the server's first answer, which compiles and caches, is not measured
                        page.open("about:blank")
                        started = time.perf_counter()
                        page.open(f"{address}{link}")
                        page.wait(is_drawn)
                        seconds = time.perf_counter() - started
                    yield name, seconds
        finally:
            ui.send_signal(signal.SIGINT)


# The table keeps those rows in the page that fit into the window
_LAST_ROW = (
    "(rows => rows.length > 5 && rows[rows.length - 1].innerText.trim() !== '')(document.querySelectorAll('.ag-row'))"
)


def comparison(clone: Clone) -> tuple[str, str]:
    """Return the link of the page that compares many trainings, and an expression that is true once it is drawn."""
    query = (
        "select run_uuid, experiment_id from runs join tags using (run_uuid) "
        "where key = 'stage' and value = 'train' and lifecycle_stage = 'active' limit ?"
    )
    with closing(sqlite3.connect(clone.folder / "mlflow.db")) as store:
        runs, experiments = zip(*store.execute(query, (COMPARED,)), strict=True)
    texts = [f"Comparing {len(runs)} Runs", runs[-1]]
    is_drawn = f"{json.dumps(texts)}.every(text => document.body.innerText.includes(text))"
    ids = {"runs": json.dumps(runs), "experiments": json.dumps([str(experiments[0])])}
    page = urlencode(ids | {"workflowType": "machine_learning"})
    return f"/?runs#/compare-runs?{page}", f"{is_drawn} && document.querySelector('.main-svg') !== null"


def measure(clone: Clone, rounds: int, folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the name and the seconds of each command."""
    gradtrail = ("-m", "gradtrail")
    yield "sync, not in the cache", clone.python(*gradtrail, "sync")
    commands = {
        "sync, nothing to do": (*gradtrail, "sync"),
        "runs": (*gradtrail, "runs"),
        "repro, nothing to do": (*gradtrail, "repro"),
        "compare": (*gradtrail, "compare", "seeds"),
    }
    for name, command in commands.items():
        yield name, statistics.median(clone.python(*command) for _ in range(rounds))
    if CHROMIUM:
        yield from measure_ui(clone, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainings", type=lambda text: [*map(int, text.split(","))], default=[250, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        clone = make_clone(folder / "clone")
        seeds = [*range(FIRST_SEED, FIRST_SEED + 20)]
        entry = {"about": "do many runs cost time?", "seeds": seeds, "timed": True, "variants": {"all": {}}}
        YAML().dump({"seeds": entry}, clone.folder / "experiments.yaml")
        clone.python("-m", "gradtrail", "sync")
        begin = FIRST_SEED
        for number in options.trainings:
            fill(clone, range(begin, FIRST_SEED + number))
            begin = FIRST_SEED + number
            results[number] = {}
            for command, seconds in measure(clone, options.rounds, folder):
                results[number][command] = seconds
                print(f"{number:,} trainings: {command}: {seconds:.2f} s", flush=True)
    table = Table("command", *(f"{number:,} trainings, s" for number in results))
    for command in next(iter(results.values())):
        table.add_row(command, *(f"{seconds[command]:.2f}" for seconds in results.values()))
    Console().print(table)
    record("many_runs", {str(number): seconds for number, seconds in results.items()}, options)


if __name__ == "__main__":
    main()
