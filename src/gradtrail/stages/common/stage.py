"""The frame of every stage script: check the environment, load params, write outputs, report errors.

A stage that ends without results leaves the outputs unchanged: those that DVC removed before the command are restored
from DVC's cache.
"""

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gradtrail.core.config import ConfigError
from gradtrail.stages.common.digests import Stamps, changed_files, stamps_of
from gradtrail.stages.common.dvc_cache import restoring_outs
from gradtrail.stages.common.environment import EnvironmentConfig, refuse_variables, set_up_jax, uses_jax
from gradtrail.stages.common.files import read_mapping, write_json, writing_outs
from gradtrail.stages.common.inputs import Inputs, read_inputs
from gradtrail.stages.common.overrides import PARAMS
from gradtrail.stages.common.params import load_section, validate
from gradtrail.stages.common.pipeline_file import StageSpec, read_pipelines
from gradtrail.stages.common.processes import describe_fault, exit_with, is_connected, join, write_log
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.common.versions import PATH as VERSIONS
from gradtrail.stages.common.versions import require_recorded_versions
from gradtrail.support.errors import UserError, environment_error
from gradtrail.support.git import require_full_clone
from gradtrail.support.live_arrays import warn_of_live_arrays
from gradtrail.support.paths import require_own_code, root, working_folder
from gradtrail.support.ranks import is_follower, refuse_followers
from gradtrail.support.running_time import seconds_running
from gradtrail.support.signals import Stopped, stopping_on_signals

Section = TypeVar("Section")


@dataclass(frozen=True)
class Stage:
    """A stage of a `dvc.yaml`, in the working folder."""

    name: str  # name of the stage, its script, its params section and its metrics file
    # Seconds since the epoch; for a stage that runs, the end of its script's imports
    made_at: float = field(default_factory=time.time, compare=False, kw_only=True)
    _written: Stamps = field(default_factory=dict, init=False, compare=False)  # of the outputs, once they are in place

    @cached_property
    def folder(self) -> Path:
        """The folder that deps and outputs are relative to."""
        return working_folder()

    @cached_property
    def pipeline(self) -> dict[str, StageSpec]:
        """All stages."""
        return read_pipelines(Path())

    @property
    def spec(self) -> StageSpec:
        """The entry of this stage in `dvc.yaml`."""
        return self.pipeline[self.name]

    @cached_property
    def inputs(self) -> Inputs:
        """The inputs of the stage at its start."""
        return read_inputs(self.name, self.spec)

    def params(self, into: type[Section], section: str | None = None) -> Section:
        """Validate a section of the params, by default that of the stage's name, as it was at the start."""
        section = section or self.name
        return validate(self.inputs.entry.params[str(PARAMS)][section], into, f"{PARAMS}: {section}")

    @cached_property
    def runtime(self) -> RuntimeConfig:
        """The section `runtime` of `params.yaml`, which cannot change an output."""
        return load_section("runtime", RuntimeConfig)

    @property
    def computes(self) -> bool:
        """Whether the stage computes with JAX; the report reads the section `environment`, but does not compute."""
        return "environment" in self.spec.params.get("params.yaml", ()) and uses_jax()

    def set_up(self) -> None:
        """Refuse variables that may change results, and set up JAX; see `environment`."""
        is_read = "environment" in self.spec.params.get("params.yaml", ())
        refuse_variables(self.params(EnvironmentConfig, "environment") if is_read else None)
        if self.computes:
            self.set_up_jax()

    def set_up_jax(self) -> None:
        """Set up JAX in a stage that imports it after its start."""
        set_up_jax(self.params(EnvironmentConfig, "environment"), self.runtime)

    @contextlib.contextmanager
    def writing_outs(self) -> Iterator[Path]:
        """Yield a folder to write all outputs to; they are moved into place together, once all are written.

        Raises:
            UserError: a debug switch is on, which may change the bits of the results; or what the stage reads changed
                after its start, so that DVC would record the results for other inputs than made them.
        """
        compiles = "jax" in self.spec.params.get(str(VERSIONS), ())
        if compiles and (self.runtime.disable_jit or self.runtime.debug_nans):
            switch = "disable_jit" if self.runtime.disable_jit else "debug_nans"
            raise UserError(f"runtime.{switch} is on: the stage finished, but writes no outs while it is on")
        with writing_outs(self.spec.outs, self.folder, self.name) as new:
            yield new
            self.inputs.require_unchanged()
        self._written.update(self._out_stamps())

    def require_unchanged(self) -> None:
        """Raise UserError if what the stage read, or the outputs that it wrote, changed before its end."""
        self.inputs.require_unchanged()
        if self._written and (changed := changed_files(self._written, self._out_stamps())):
            file = Path(changed[0]).relative_to(self.folder)
            raise UserError(f"{file} changed while {self.name} was ending; `dvc repro` runs it again")

    def _out_stamps(self) -> Stamps:
        """Return the stamps of the outputs without the time of the last change, which a hard link changes too."""
        stamps = stamps_of(self.folder / out for out in self.spec.outs)
        return {path: stamp[1:] for path, stamp in stamps.items()}

    def write_metrics(self, new: Path, metrics: Mapping[str, Any]) -> None:
        """Write the metrics file to the folder of the new outs: flat keys, numbers rounded to 9 significant digits."""
        path = new / "results" / "metrics" / f"{self.name}.json"
        write_json(path, {key: _plain(value) for key, value in metrics.items()})

    def write_costs(self, new: Path, costs: Mapping[str, Mapping[str, int]]) -> None:
        """Write function → static cost → value to the folder of the new outputs, as `results/costs/<stage>.json`."""
        write_json(new / "results" / "costs" / f"{self.name}.json", costs)

    def read_metrics(self) -> dict[str, Any]:
        """Read the metrics file from the working folder."""
        name = f"results/metrics/{self.name}.json"
        return read_mapping(self.folder / name, "metrics", name)


def run_stage(
    main: Callable[[Stage], None],
    name: str,
    shows: tuple[str, ...] = (),
    follow: Callable[[Stage], None] | None = None,
) -> None:
    """Run a stage script, print one line with these metrics and the time it took, and exit with its status.

    0: success. 1: a bug, with a traceback. 2: an error that the user can fix, as one line on stderr. 130: stopped by
    Ctrl-C. 143: stopped by SIGTERM.

    Args:
        main: function with the stage's work; of several processes, process 0 calls it.
        follow: function that the other processes call; None if the stage runs in one process alone.
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
            require_recorded_versions(stage.spec.params.get(str(VERSIONS), ()))
            stage.set_up()
            if follow is None:
                refuse_followers(name)
            else:
                join(stage.runtime.join_seconds)
            with stopping_on_signals(f"stopped; `dvc repro` restarts {name}"):
                (follow if follow and is_follower() else main)(stage)
        if not is_follower():
            print(_summary(stage, shows), flush=True)
            warn_of_live_arrays(name)
    except Exception as fault:
        if message := _describe(stage, fault):
            _end(stage, message, 2)
        if is_connected():
            _end(stage, describe_fault(fault), 2)
        raise
    except Stopped as stop:
        _end(stage, str(stop), 128 + stop.number)
    except KeyboardInterrupt:
        _end(stage, f"stopped; `dvc repro` restarts {name}", 130)
    finally:
        gc.freeze()  # a last collection at exit would take half a second


def _describe(stage: Stage, fault: Exception) -> str:
    """Return a fault that the user can correct in one line; empty for a bug."""
    if isinstance(fault, UserError | ConfigError | FloatingPointError):  # the last one: the training diverged
        if isinstance(fault, FloatingPointError) and stage.runtime.debug_nans:
            return ""  # the switch is there for the traceback
        return str(fault)
    message = environment_error(fault)
    return f"{message}; no results were written" if message else ""


def _end(stage: Stage, message: str, status: int) -> None:
    print(f"{stage.name}: {message}", file=sys.stderr, flush=True)
    exit_with(status)


def _summary(stage: Stage, shows: tuple[str, ...]) -> str:
    """Return the last line of a stage: metrics, and the seconds since the process began."""
    metrics = stage.read_metrics() if shows else {}
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
