"""The frame of every stage script: check the environment, load params, write outputs, report errors.

A stage that ends without results leaves the outputs unchanged: those that DVC removed before the command are restored
from DVC's cache.
"""

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gradtrail.core.config import ConfigError
from gradtrail.stages.common.dvc_cache import restoring_outs
from gradtrail.stages.common.environment import (
    EnvironmentConfig,
    RuntimeConfig,
    refuse_variables,
    set_up_jax,
)
from gradtrail.stages.common.files import (
    Stamps,
    changed_files,
    read_json,
    stamps_of,
    write_json,
    writing_outs,
)
from gradtrail.stages.common.params import PARAMS, flatten, load_section, params_file, validate_section
from gradtrail.stages.common.pipeline_file import (
    FILES,
    Entry,
    StageSpec,
    dvc_file,
    is_code,
    is_source,
    live_entry,
    read_pipelines,
    sections_of,
)
from gradtrail.stages.common.processes import describe_fault, exit_with, is_connected, join, write_log
from gradtrail.stages.common.versions import VERSIONS, require_recorded_versions
from gradtrail.support.errors import UserError, environment_error
from gradtrail.support.git import require_full_clone
from gradtrail.support.paths import require_own_code, root, same_command, working_folder
from gradtrail.support.ranks import is_follower, refuse_followers
from gradtrail.support.running_time import seconds_running
from gradtrail.support.signals import Stopped, stopping_on_signals

Section = TypeVar("Section")

_DATASET = ("dataset", "dataset_digest")  # keys of every metrics file
_CLOCK_SECONDS = 0.02  # largest difference of the clocks: a tick of 10 ms for processes, of 4 ms for files


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of a stage at its start: its results are recorded only if the inputs are the same at its end.

    DVC hashes params and deps after the command has ended. Without this check, the results of a stage whose params,
    code or data were edited meanwhile would be recorded, and later served from the run-cache, under inputs that never
    made them. Code and params are read once, at the start, so that an edit which was undone is none. Data are read at
    any time: they may not have been touched, even if their content is the same again.
    """

    name: str
    spec: StageSpec
    entry: Entry
    sources: Stamps  # of code and params
    data: Stamps  # of all other files that the stage reads

    def have_changed(self) -> bool:
        return (self._touched_data() or self._changed_source()) != ""

    def require_unchanged(self) -> None:
        """Raise UserError, one line that names what changed, unless the inputs are those of the start."""
        self.require_data()
        if change := self._changed_source():
            raise UserError(
                f"{change} while {self.name} ran, so its results are not recorded. {same_command()} runs it again; a "
                "training resumes if the change is undone."
            )

    def require_data(self) -> None:
        """Raise UserError, one line, if data may have had another content since the start."""
        if touched := self._touched_data():
            raise UserError(
                f"{touched} while {self.name} ran, so its results are not recorded. {same_command()} runs it again."
            )

    def _touched_data(self) -> str:
        for path in changed_files(self.data, _read_data_stamps(self.spec)):
            return f"{path} was {'written' if Path(path).exists() else 'removed'}"
        return ""

    def _changed_source(self) -> str:
        """Return the first change of code, params or versions since the start; empty if there is none."""
        try:
            require_recorded_versions(self.spec.params.get(str(VERSIONS), ()))
            if (stamps := _read_source_stamps(self.spec)) == self.sources:
                return ""
            if read_pipelines(Path()).get(self.name) != self.spec:
                return f"{dvc_file(self.name)}: stage {self.name} changed"
            now = live_entry(self.spec, Path())
        except FileNotFoundError as error:
            return f"{error.filename} was removed"
        except UserError as error:
            return f"a file that it reads changed ({error})"
        return _first_change(self.entry, now, changed_files(self.sources, stamps))


def read_inputs(name: str, spec: StageSpec) -> Inputs:
    """Read the inputs of a stage in the working folder.

    Raises:
        UserError: a dep or a param is missing; or code changed after this process started, which may have imported
            either version.
    """
    sources, data = _read_source_stamps(spec), _read_data_stamps(spec)
    began = time.time() - seconds_running() + _CLOCK_SECONDS
    for path, (changed, *_) in (sources | data).items():
        if changed / 1e9 > began and is_code(path.as_posix()):
            raise UserError(f"{path} changed while {name} was starting; run it again")
    if missing := [dep for dep in spec.deps if not Path(dep).exists()]:
        raise UserError(f"{missing[0]}: no such file or folder, which {name} reads; `dvc repro {name}` makes it")
    entry = live_entry(spec, Path())
    return Inputs(name=name, spec=spec, entry=entry, sources=sources, data=data)


def _read_source_stamps(spec: StageSpec) -> Stamps:
    return stamps_of(map(Path, (*FILES[::2], *spec.params, *filter(is_source, spec.deps))))


def _read_data_stamps(spec: StageSpec) -> Stamps:
    """Return the stamps of the files of all deps but code that is read once, at the start."""
    return stamps_of(Path(dep) for dep in spec.deps if not is_source(dep))


def _first_change(before: Entry, after: Entry, files: list[str]) -> str:
    """Return the first param that differs, or the first of the changed files in a dep that differs."""
    for name, params in before.params.items():
        old, new = flatten(params), flatten(after.params[name])
        for key in sorted({*old, *new}):
            was, is_now = (repr(values[key]) if key in values else "nothing" for values in (old, new))
            if was != is_now:
                return f"{name}: {key} changed from {was} to {is_now}"
    for dep, md5 in before.deps.items():
        if after.deps[dep] != md5:
            return f"{next((file for file in files if file.startswith(dep)), dep)} changed"
    return ""


@dataclass(frozen=True)
class Stage:
    """A stage of a `dvc.yaml`, in the working folder."""

    name: str  # name of the stage, its script, its params section and its metrics file
    # Seconds since the epoch; for a stage that runs, the end of its script's imports
    made_at: float = field(default_factory=time.time)

    @cached_property
    def folder(self) -> Path:
        """The folder that deps and outputs are relative to."""
        return working_folder()

    @cached_property
    def pipeline(self) -> dict[str, StageSpec]:
        return read_pipelines(Path())

    @property
    def spec(self) -> StageSpec:
        return self.pipeline[self.name]

    @cached_property
    def inputs(self) -> Inputs:
        return read_inputs(self.name, self.spec)

    def params(self, into: type[Section], section: str | None = None) -> Section:
        """Validate a section of the params, by default that of the stage's name, as it was at the start."""
        section = section or self.name
        return validate_section(sections_of(self.inputs.entry.params)[section], into, section, params_file(section))

    @cached_property
    def runtime(self) -> RuntimeConfig:
        return load_section("runtime", RuntimeConfig)

    @property
    def _reads_environment(self) -> bool:
        return "environment" in self.spec.params.get(str(PARAMS), ())

    @property
    def computes(self) -> bool:
        """Whether the stage computes with JAX; the report reads the section `environment`, but does not compute."""
        return self._reads_environment and "jax" in sys.modules

    def set_up(self) -> None:
        """Refuse variables that may change results, and set up JAX; see `environment`."""
        refuse_variables(self.params(EnvironmentConfig, "environment") if self._reads_environment else None)
        if self.computes:
            set_up_jax(self.params(EnvironmentConfig, "environment"), self.runtime)

    @contextlib.contextmanager
    def writing_outs(self) -> Iterator[Path]:
        """Yield a folder to write all outputs to; they are moved into place together, once all are written.

        Raises:
            UserError: `runtime.disable_jit` is on; or what the stage reads changed after its start, so that DVC would
                record the results for other inputs than made them.
        """
        compiles = "jax" in self.spec.params.get(str(VERSIONS), ())
        if compiles and self.runtime.disable_jit:
            raise UserError("runtime.disable_jit is on: the stage finished, but writes no outs while it is on")
        with writing_outs(self.spec.outs, self.folder, self.name) as new:
            yield new
            self.inputs.require_unchanged()

    def write_metrics(self, new: Path, metrics: Mapping[str, Any], compared: Sequence[str] = ()) -> None:
        """Write the metrics to the folder of the new outs: flat keys, numbers rounded to 9 significant digits.

        Args:
            compared: Metrics that people compare; `dvc metrics diff` shows them. The others are written to
                `results/<stage>/other_metrics.json`. By default all metrics are compared.
        """
        plain = {key: _plain(value) for key, value in metrics.items()}
        if compared:
            remaining = {key: plain.pop(key) for key in metrics if key not in (*compared, *_DATASET)}
            write_json(new / self._metrics_files[1], remaining)
        write_json(new / self._metrics_files[0], plain)

    def write_costs(self, new: Path, costs: Mapping[str, Mapping[str, int]]) -> None:
        """Write function → static cost → value to the folder of the new outputs, as `results/costs/<stage>.json`."""
        write_json(new / "results" / "costs" / f"{self.name}.json", costs)

    def read_metrics(self) -> dict[str, Any]:
        """Return all metrics of the stage; those that people compare alone if its outputs are not here."""
        compared, remaining = (self.folder / path for path in self._metrics_files)
        return {**read_json(compared), **(read_json(remaining) if remaining.exists() else {})}

    @property
    def _metrics_files(self) -> tuple[str, str]:
        return f"results/metrics/{self.name}.json", f"results/{self.name}/other_metrics.json"


def run_stage(
    main: Callable[[Stage], None],
    name: str,
    shows: tuple[str, ...] = (),
    follow: Callable[[Stage], None] | None = None,
    of: str = "",
) -> None:
    """Run a stage script, print one line with these metrics and the time it took, and exit with its status.

    0: success. 1: a bug, with a traceback. 2: an error that the user can fix, as one line on stderr. 130: stopped by
    Ctrl-C. 129 and 143: stopped by a closed terminal, and by SIGTERM.

    Args:
        main: function with the stage's work; of several processes, process 0 calls it.
        follow: function that the other processes call; None if the stage runs in one process alone.
        of: stage whose metrics are printed; if empty, this one.
    """
    stage = Stage(name)
    gc.freeze()  # what was imported stays
    gc.enable()
    try:
        with restoring_outs(name):
            require_own_code()
            if follow is not None:
                write_log()
            if stage.folder != root():  # DVC runs it in a copy
                require_full_clone(root())
            inputs = stage.inputs  # read here, before the script reads any of them
            require_recorded_versions(inputs.spec.params.get(str(VERSIONS), ()))
            stage.set_up()
            if follow is None:
                refuse_followers(name)
            else:
                join(stage.runtime.join_seconds)
            with stopping_on_signals(f"stopped; {same_command()} restarts {name}"):
                (follow if follow and is_follower() else main)(stage)
        if not is_follower():
            print(_summary(stage, shows, of), flush=True)
    except Exception as fault:
        if message := _describe(fault):
            _end(stage, message, 2)
        if is_connected():
            _end(stage, describe_fault(fault), 2)
        raise
    except Stopped as stop:
        _end(stage, str(stop), 128 + stop.number)
    except KeyboardInterrupt:
        _end(stage, f"stopped; {same_command()} restarts {name}", 130)
    finally:
        gc.freeze()  # a last collection at exit would take half a second


def _describe(fault: Exception) -> str:
    """Return a fault that the user can correct in one line; empty for a bug."""
    if isinstance(fault, UserError | ConfigError | FloatingPointError):  # the last one: the training diverged
        return str(fault)
    message = environment_error(fault)
    return f"{message}; no results were written" if message else ""


def _end(stage: Stage, message: str, status: int) -> None:
    print(f"{stage.name}: {message}", file=sys.stderr, flush=True)
    exit_with(status)


def _summary(stage: Stage, shows: tuple[str, ...], of: str) -> str:
    """Return the last line of a stage: metrics, and the seconds since the process began."""
    metrics = (Stage(of) if of else stage).read_metrics() if shows else {}
    values = {key.removeprefix("num_").replace("_", " "): metrics[key] for key in shows if key in metrics}
    parts = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value:,}" for key, value in values.items()]
    return f"{stage.name}: {', '.join([*parts, f'{seconds_running():.1f} s'])}"


def _plain(value: Any) -> Any:
    """Convert a NumPy or JAX scalar to a Python number, rounded to 9 significant digits."""
    if isinstance(value, str | bool | int):
        return value
    if str(getattr(value, "dtype", "")).startswith("int"):
        return int(value)
    return float(f"{float(value):.9g}")
