"""After any history and a sync, each state that was recorded has one run, whose digests are those of its files.

What is recorded is read here anew, from the locks of the working folder, commits and experiments and from the entries
of DVC's run-cache, so that this shares no code with the sync that it judges.
"""

import contextlib
import functools
import hashlib
import json
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from projects import Project, stop
from ruamel.yaml import YAML
from small_project import finished_small_project

RATE, CLIP, BINS = "train.adamw.learning_rate", "train.clip_norm", "evaluate.calibration_bins"
CHANGES = st.sampled_from([(RATE, 0.5), (RATE, 0.005), (CLIP, 5.0), (CLIP, 1.0), (BINS, 7), (BINS, 15)])
CHANGED = (RATE, CLIP, BINS)
READS = {
    "fetch": "dataset",
    "train": "adamw.learning_rate",
    "evaluate": "calibration_bins",
    "gradients": "top_fraction",
}
STAGES, CORE = list(READS), ("first", "second", "third")
DATA = {"train": "data/words.txt", **dict.fromkeys(("evaluate", "gradients"), "models/final.safetensors")}
WRITES = {"data/words.txt": "fetch", "models/final.safetensors": "train"}
LIE = 0.9  # a learning rate with which no stage ever ran
LIES = [  # commands by which DVC records outs for params that did not make them
    [["freeze", "train"], ["repro", "--force", "--single-item", "train"], ["unfreeze", "train"]],
    [["exp", "save", "--name", "lie"], ["exp", "remove", "lie"]],
    [["commit", "--force"]],
]
EDITS = [
    *((RATE, value) for value in (0.5, 0.7)),
    (BINS, 9),
    *((f"src/gradtrail/core/{name}.py", word) for name in CORE for word in (name, "other")),
    ("data/words.txt", "other words"),
    ("models/final.safetensors", "other weights"),
]
Result = tuple[str, str, str]  # stage, digest of its own params that change, digest of its outs without the metrics


class Histories(RuleBasedStateMachine):
    """What a person does with a repository, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.project = finished_small_project().copy(Path(self.folder.name) / "project")
        self.number = 0
        self.texts: dict[str, str] = {}  # of files that there were at a sync, by their MD5
        self.deleted: dict[tuple[str, str], Result] = {}  # state and digest of outs of runs that a person deleted

    def teardown(self) -> None:
        for shipper in Project(Path(self.folder.name)).processes("gradtrail.tracking"):
            with contextlib.suppress(psutil.NoSuchProcess):
                shipper.kill()
        self.folder.cleanup()

    def dvc_unless_files_are_lost(self, *arguments: str) -> None:
        """Run DVC, which may fail if its cache lacks files, and for no other reason."""
        process = self.project.start_dvc(*arguments)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0 or "Is your cache up to date?" in output, output

    @initialize()
    def begin(self) -> None:
        self.sync()

    @rule(change=CHANGES)
    def change_a_param(self, change: tuple[str, Any]) -> None:
        self.project.set(*change)
        self.project.dvc("repro")

    @rule(change=CHANGES)
    def run_an_experiment(self, change: tuple[str, Any]) -> None:
        self.project.dvc("exp", "run", "-S", f"{change[0]}={change[1]}")

    @rule()
    def apply_an_experiment(self) -> None:
        if names := self.project.dvc("exp", "list", "--name-only").split():
            self.dvc_unless_files_are_lost("exp", "apply", names[0])

    @rule(change=CHANGES)
    def branch_and_remove_an_experiment(self, change: tuple[str, Any]) -> None:
        self.number += 1
        name = f"experiment-{self.number}"
        self.project.dvc("exp", "run", "--temp", "-S", f"{change[0]}={change[1]}", "--name", name)
        if name in self.project.dvc("exp", "list", "--name-only").split():
            self.project.dvc("exp", "branch", name, f"of-{name}")
            self.project.dvc("exp", "remove", name)

    @rule()
    def commit(self) -> None:
        if self.project.git("status", "--porcelain", "--untracked-files=no"):
            self.project.git("commit", "-qam", "some")

    @rule()
    def branch_off(self) -> None:
        self.number += 1
        self.project.git("checkout", "-qb", f"branch-{self.number}")

    @rule(stage=st.sampled_from(["fetch", "train", "evaluate"]))
    def edit_code(self, stage: str) -> None:
        with (self.project.folder / f"pipeline/{stage}.py").open("a") as code:
            code.write("# a comment\n")
        self.project.dvc("repro")

    @rule()
    def check_out_another_commit(self) -> None:
        branches = self.project.git("for-each-ref", "--format=%(refname:short)", "refs/heads").split()
        self.project.git("checkout", "-qf", branches[0])
        self.dvc_unless_files_are_lost("checkout", "--force")

    @rule(edit=st.sampled_from(EDITS), stage=st.sampled_from(STAGES), seconds=st.floats(0, 4))
    def edit_while_a_stage_runs(self, edit: tuple[str, Any], stage: str, seconds: float) -> None:
        """Where the edit came too late for the stage to see it, force it; `gradtrail sync` says so of params.

        An edit of its own outs may be a result of another kind of machine.
        """
        if WRITES.get(edit[0]) == stage:
            return
        arguments = ("repro", "--force", "--single-item", stage)
        process = self.project.start_dvc(*arguments)
        time.sleep(seconds)
        self.edit(*edit)
        output, _ = process.communicate(timeout=300)
        assert "Traceback" not in output
        assert process.returncode == 0 or " changed " in output or "missing data" in output, output
        message = self.project.sync()
        self.texts |= texts(self.project)
        section = working_lock(self.project)[stage]
        if not self.follows(stage, section["params"], deps_of(section), outs_of(section)):
            assert edit[0].endswith((".py", ".txt", ".safetensors")) or "it has no run" in message
            self.project.dvc(*arguments)
            self.lose_the_run_cache()  # DVC would restore what it recorded wrongly
        self.sync()

    @rule(stage=st.sampled_from(list(DATA)))
    def change_data_while_a_stage_reads_them(self, stage: str) -> None:
        """And put them back."""
        path, lock = DATA[stage], self.project.lock()
        if not (self.project.folder / path).exists():
            return
        scripts = {"before": f"mv {path} .git/right; echo lie > {path}", "after": f"mv .git/right {path}"}
        for when, script in scripts.items():
            (self.project.folder / f".git/{when}_reading.sh").write_text(script)
        output = self.project.dvc("repro", "--force", "--single-item", stage, status=255)
        for when in scripts:
            (self.project.folder / f".git/{when}_reading.sh").unlink()
        assert f"{path} was written while {stage} ran" in output, output
        assert self.project.lock() == lock
        self.sync()

    @rule(commands=st.sampled_from(LIES))
    def record_outs_for_other_params(self, commands: list[list[str]]) -> None:
        """If an execution shows that other params made them; then undo it all."""
        section, folder = working_lock(self.project)["train"], self.project.folder
        deps, outs = deps_of(section), outs_of(section)
        executed = [run["outs"] for run in self.project.runs_of("train") if is_execution(run)]
        if outs not in executed or self.project.digests(*deps, *outs) != deps | outs:
            return
        before = {name: (folder / name).read_bytes() for name in ("dvc.yaml", "dvc.lock", "params.yaml")}
        self.project.set(RATE, LIE)
        *record, last = commands
        for command in record or [last]:
            self.project.dvc(*command)
        message = self.project.sync()
        assert (
            f"with {RATE} {section['params']['params.yaml']['train']['adamw']['learning_rate']}, not {LIE}" in message
        )
        assert str(LIE) not in [run["params"][RATE] for run in self.project.runs_of("train")]
        if record:
            self.project.dvc(*last)
        for name, content in before.items():
            (folder / name).write_bytes(content)
        self.lose_the_run_cache()
        self.sync()

    def edit(self, target: str, value: Any) -> None:
        path = self.project.folder / target
        if target.endswith(".py"):
            path.write_text(f"WORD = {value!r}\n")
        elif "/" in target:
            path.unlink(missing_ok=True)  # it may be a link into the cache
            path.write_text(value)
        else:
            self.project.set(target, value)

    @rule()
    def lose_the_cache(self) -> None:
        shutil.rmtree(self.project.folder / ".dvc/cache/files", ignore_errors=True)

    @rule()
    def lose_the_run_cache(self) -> None:
        shutil.rmtree(self.project.folder / ".dvc/cache/runs", ignore_errors=True)

    @rule()
    def lose_the_store(self) -> None:
        self.project.empty_store()

    @rule(number=st.integers(0, 9))
    def delete_a_run(self, number: int) -> None:
        if runs := finished_runs(self.project):
            key, result, run_id = runs[number % len(runs)]
            self.project.delete_run(run_id)
            self.deleted[key] = result
            self.sync()

    @rule()
    def write_over_the_weights(self) -> None:
        self.edit("models/final.safetensors", "other weights")

    @rule(change=CHANGES)
    def kill_a_repro(self, change: tuple[str, Any]) -> None:
        self.project.set(*change)

        def has_begun() -> bool:
            time.sleep(0.05)  # readers that never pause keep SQLite's writers waiting
            return any(run["status"] == "RUNNING" for run in self.project.runs())

        stop(self.project.start(sys.executable, "-m", "dvc", "repro", "--force"), signal.SIGKILL, when=has_begun)
        with contextlib.suppress(FileNotFoundError):
            (self.project.folder / ".dvc/tmp/rwlock").unlink()

    @rule(change=CHANGES)
    def lose_the_server(self, change: tuple[str, Any]) -> None:
        """Run the stages while no store can be reached: their records stay."""
        self.project.set(*change)
        self.project.dvc("repro", env={"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"})

    @rule(change=CHANGES, seconds=st.floats(0, 8))
    def kill_a_shipper(self, change: tuple[str, Any], seconds: float) -> None:
        self.project.set(*change)
        process = self.project.start(sys.executable, "-m", "dvc", "repro", "--force")
        time.sleep(seconds)
        for shipper in self.project.processes("gradtrail.tracking"):
            with contextlib.suppress(psutil.NoSuchProcess):
                shipper.kill()
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output

    @rule(share=st.floats(0, 1))
    def lose_the_ends_of_records(self, share: float) -> None:
        """Do what a loss of power does to files that are not on the disk yet."""
        for path in self.project.folder.glob(".gradtrail/records/*/*/*.json*"):
            written = path.read_bytes()
            path.write_bytes(written[: round(share * len(written))])

    @rule(change=CHANGES)
    def hang(self, change: tuple[str, Any]) -> None:
        """Run the stages while the store accepts connections and never answers."""
        self.project.set("runtime.tracking_seconds", 0.5)
        self.project.set(*change)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.project.dvc("repro", env={"MLFLOW_TRACKING_URI": f"http://127.0.0.1:{server.getsockname()[1]}"})

    @rule(number=st.integers(0, 99), share=st.floats(0, 1))
    def damage_a_record(self, number: int, share: float) -> None:
        if files := sorted(path for path in self.project.folder.glob(".gradtrail/records/*/*/**/*") if path.is_file()):
            path = files[number % len(files)]
            content = bytearray(path.read_bytes() or b" ")
            content[int(share * (len(content) - 1))] ^= 0x40
            path.write_bytes(content)

    @rule()
    def rename_the_experiments(self) -> None:
        """And let somebody else create ones with their names."""
        self.number += 1
        with contextlib.closing(sqlite3.connect(self.project.folder / "mlflow.db")) as store, store:
            names = store.execute(
                "select name from experiments where experiment_id in (select experiment_id from runs)"
            )
            for (name,) in names.fetchall():
                store.execute("update experiments set name = ? where name = ?", (f"{name} {self.number}", name))
                columns = "name, artifact_location, lifecycle_stage, creation_time, last_update_time"
                values = (name, str(self.project.folder / "elsewhere"), "active", 0, 0)
                store.execute(f"insert into experiments ({columns}) values (?, ?, ?, ?, ?)", values)  # noqa: S608

    @rule(change=CHANGES)
    def work_in_two_clones_at_once(self, change: tuple[str, Any]) -> None:
        """The second one logs to the store of the first."""
        self.number += 1
        self.project.git("clone", "-q", ".", clone := f"{self.folder.name}/clone-{self.number}")
        clones = [self.project, Project(Path(clone))]
        env = {"MLFLOW_TRACKING_URI": f"sqlite:///{self.project.folder}/mlflow.db"}
        for project in clones:
            project.set(*change)
        at_once = [project.start(sys.executable, "-m", "dvc", "repro", "--force", env=env) for project in clones]
        outputs = [process.communicate(timeout=300)[0] for process in at_once]
        assert [process.returncode for process in at_once] == [0, 0], outputs
        clones[1].wait_for_shipping()
        clones[1].sync(**env)
        self.texts |= texts(clones[1])

    @rule()
    def sync(self) -> None:
        self.project.sync()
        self.texts |= texts(self.project)
        wrong = [run["name"] for run in self.project.runs() if run["status"] == "FINISHED" and not self.is_true(run)]
        assert not wrong, f"runs whose outs do not follow from their params and deps: {wrong}"
        runs = finished_runs(self.project)
        twins = [result for result, count in Counter(run[0] for run in runs).items() if count > 1]
        assert not twins, f"states with two runs of one result: {twins}"
        for run in self.project.runs():
            key = run["tags"]["state"], digest(run["outs"])
            if is_execution(run):  # since the deletion
                self.deleted.pop(key, None)
            assert key not in self.deleted, f"a deleted run came back: {run['name']}"
        with contextlib.closing(sqlite3.connect(self.project.folder / "mlflow.db")) as store:
            foreign = (
                "experiment_id not in (select experiment_id from experiment_tags where key = 'gradtrail.experiment')"
            )
            assert not store.execute(f"select run_uuid from runs where {foreign}").fetchall()  # noqa: S608
        recorded = recorded_results(self.project)
        executed = {
            (run["tags"]["stage"], without_metrics(run["outs"])) for run in self.project.runs() if is_execution(run)
        }
        found = {result for _, result, _ in runs} | {*self.deleted.values()}
        # Of two states of equal outs, one that was executed and one that was not, only the first has a run
        missing = {result for result in recorded - found if (result[0], result[2]) not in executed}
        assert not missing, f"recorded, but without a run: {missing}"
        before = self.project.runs()
        self.project.sync()
        assert self.project.runs() == before, "a second sync changes nothing"

    def is_true(self, run: dict[str, Any]) -> bool:
        """Whether a run's outs are what its stage makes of its params and deps; of deps that are lost, assume so."""
        stage = run["tags"]["stage"]
        made = json.loads((run["artifacts"] / "lineage.json").read_text())[stage]
        return self.follows(stage, made["params"], made["deps"], run["outs"])

    def follows(self, stage: str, params: dict[str, Any], deps: dict[str, str], outs: dict[str, str]) -> bool:
        """Whether outs are what a stage makes of its params and deps; of deps that are lost, assume so."""
        value = value_of(params["params.yaml"], f"{stage}.{READS[stage]}")
        core = next(path for path in deps if path.startswith("src/"))
        words = [self.texts.get(deps[path]) for path in deps if path in WRITES]
        if None in words or deps[core] not in self.texts:
            return True
        text = " ".join([*words, self.texts[deps[core]].split("'")[1], value[:4]])
        expected = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
        return all(md5 == expected for path, md5 in outs.items() if not path.startswith("results/metrics/"))


def texts(project: Project) -> dict[str, str]:
    """Return the text of each file in DVC's cache, and of what stages read in the working folder."""
    cached = [path for path in (project.folder / ".dvc/cache/files").rglob("*") if path.is_file()]
    read = [project.folder / path for path in (*(f"src/gradtrail/core/{name}.py" for name in CORE), "data/words.txt")]
    contents = [path.read_bytes() for path in (*cached, *read) if path.exists()]
    return {hashlib.md5(content, usedforsecurity=False).hexdigest(): content.decode() for content in contents}


def finished_runs(project: Project) -> list[tuple[tuple[str, str], Result, str]]:
    """Return, of each finished run, its state with its outs, its result, and its id."""
    results = []
    for run in project.runs():
        tags = run["tags"]
        assert run["status"] != "RUNNING"
        if run["status"] == "FINISHED":
            outs, stage = run["outs"], tags["stage"]
            params = {key: run["params"][key] for key in CHANGED if key.startswith(f"{stage}.")}
            results.append(((tags["state"], digest(outs)), (stage, digest(params), without_metrics(outs)), run["id"]))
            assert stage in ("fetch", "train") or (run["artifacts"] / "results/words.txt").is_file()
    return results


def recorded_results(project: Project) -> set[Result]:
    """Return the results whose outs are there, of all locks and of the run-cache, whose lineage they complete."""
    return {
        (name, digest(read_params(name, section["params"]["params.yaml"])), without_metrics(outs_of(section)))
        for lock in locks(project)
        if is_sound(lock)
        for name, section in lock.items()
        if all(is_here(project, path, md5) for path, md5 in outs_of(section).items())
    }


def read_params(stage: str, params: dict[str, Any]) -> dict[str, str]:
    """Return the changed params of a stage as a run has them."""
    return {key: value_of(params, key) for key in CHANGED if key.startswith(f"{stage}.")}


def is_execution(run: dict[str, Any]) -> bool:
    return run["status"] == "FINISHED" and "rebuilt" not in run["tags"]


def working_lock(project: Project) -> dict[str, Any]:
    return YAML(typ="safe").load(project.lock())["stages"]


def locks(project: Project) -> Iterator[dict[str, Any]]:
    texts = [(project.folder / "dvc.lock").read_text()]
    commits = project.git("rev-list", "--all").split()
    for commit in [*commits, *project.git("for-each-ref", "--format=%(objectname)", "refs/exps").split()]:
        with contextlib.suppress(subprocess.CalledProcessError):
            texts.append(
                subprocess.check_output(
                    ["git", "show", f"{commit}:dvc.lock"], cwd=project.folder, text=True, stderr=subprocess.DEVNULL
                )
            )
    yield from (YAML(typ="safe").load(text)["stages"] for text in dict.fromkeys(texts))


def is_sound(lock: dict[str, Any]) -> bool:
    """Whether all four stages are there, each having read what the others wrote."""
    outs = {path: md5 for section in lock.values() for path, md5 in outs_of(section).items()}
    deps = [pair for section in lock.values() for pair in deps_of(section).items()]
    return len(lock) == 4 and all(outs.get(path, md5) == md5 for path, md5 in deps)


def deps_of(section: dict[str, Any]) -> dict[str, str]:
    return {dep["path"]: dep["md5"] for dep in section["deps"]}


def outs_of(section: dict[str, Any]) -> dict[str, str]:
    return {out["path"]: out["md5"] for out in section["outs"]}


def is_here(project: Project, path: str, md5: str) -> bool:
    """Whether DVC's cache, a commit or the working folder has a file."""
    if path.startswith("results/metrics/"):
        return True  # in a commit, or of the working folder's lock
    path_here = project.folder / path
    is_in_place = path_here.is_file() and hashlib.md5(path_here.read_bytes(), usedforsecurity=False).hexdigest() == md5
    return is_in_place or (project.folder / ".dvc/cache/files/md5" / md5[:2] / md5[2:]).is_file()


def value_of(params: dict[str, Any], key: str) -> str:
    return str(functools.reduce(dict.__getitem__, key.split("."), params))


def without_metrics(outs: dict[str, str]) -> str:
    return digest({path: md5 for path, md5 in outs.items() if not path.startswith("results/metrics/")})


def digest(content: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


@pytest.mark.nightly
def test_random_histories_leave_one_run_for_each_state() -> None:
    """200 histories; a failure prints the steps."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    chosen = settings(max_examples=200, stateful_step_count=8, deadline=None, suppress_health_check=checks)
    run_state_machine_as_test(Histories, settings=chosen)


@pytest.mark.slow
def test_a_history_of_every_step_leaves_one_run_for_each_state() -> None:
    machine = Histories()
    try:
        machine.begin()
        machine.change_a_param((RATE, 0.5))
        machine.commit()
        machine.branch_off()
        machine.edit_code("fetch")
        machine.sync()
        machine.run_an_experiment((BINS, 7))
        machine.branch_and_remove_an_experiment((BINS, 7))
        machine.kill_a_repro((CLIP, 5.0))
        machine.lose_the_server((RATE, 0.005))
        machine.lose_the_ends_of_records(0.9)
        machine.lose_the_server((RATE, 0.5))
        machine.sync()
        machine.work_in_two_clones_at_once((RATE, 0.005))
        machine.sync()
        machine.rename_the_experiments()
        machine.hang((RATE, 0.5))
        for number in range(3):
            machine.damage_a_record(30 * number, 0.5)
        machine.sync()
        machine.kill_a_shipper((CLIP, 1.0), 3.0)
        machine.edit_while_a_stage_runs((RATE, 0.7), "train", 1.0)
        machine.change_data_while_a_stage_reads_them("evaluate")
        for commands in LIES:
            machine.record_outs_for_other_params(commands)
        machine.apply_an_experiment()
        machine.write_over_the_weights()
        for number in range(2):
            machine.delete_a_run(number)
        machine.check_out_another_commit()
        machine.lose_the_store()
        machine.sync()
        machine.change_a_param((RATE, 0.005))
        machine.lose_the_cache()
        machine.lose_the_run_cache()
        machine.sync()
    finally:
        machine.teardown()


@pytest.mark.nightly
def test_twenty_experiments_by_four_workers_leave_all_their_runs() -> None:
    machine, rates = Histories(), [f"0.{number}" for number in range(11, 31)]  # each of which writes other bytes
    project = machine.project
    try:
        project.sync()
        project.dvc("exp", "run", "--queue", "-S", f"{RATE}={','.join(rates)}")
        project.start_queue(4)
        status = project.wait_for_queue(seconds=1200)
        assert status.count("Success") == len(rates), status
        logs = [path.read_text(errors="replace") for path in (project.folder / ".dvc/tmp/exps/run").rglob("*.out")]
        assert len(logs) == len(rates)
        assert not [log for log in logs if "warning: MLflow" in log]
        runs = {run["tags"]["state"]: run for run in project.runs()}
        assert len(runs) == len(project.runs()) == 1 + 3 * (1 + len(rates))
        for run in runs.values():
            if "train_state" in run["tags"]:
                training = runs[run["tags"]["train_state"]]
                assert run["tags"]["mlflow.parentRunId"] == training["id"]
                assert run["tags"].get("dvc.exp_name") == training["tags"].get("dvc.exp_name")
                headlines = {"eval/loss", "gradients/grad_norm_median"} & run["metrics"].keys()
                assert headlines
                assert all(run["metrics"][name] == training["metrics"][name] for name in headlines)
        machine.sync()
        assert project.sync() == f"{len(runs)} runs present\n"
    finally:
        machine.teardown()
