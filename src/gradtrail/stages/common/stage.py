"""What every stage script does around its work: check the ground, read params, write outs, report faults."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gradtrail.core.common.validation import ConfigError
from gradtrail.stages.common.files import write_json, writing_outs
from gradtrail.stages.common.params import load_section
from gradtrail.stages.common.pipeline_file import StageSpec, read_pipeline
from gradtrail.stages.common.runtime import RuntimeConfig
from gradtrail.stages.common.versions import PATH as VERSIONS
from gradtrail.stages.common.versions import require_recorded_versions
from gradtrail.support.errors import UserError, environment_error
from gradtrail.support.live_arrays import warn_of_live_arrays
from gradtrail.support.paths import require_own_code, working_folder
from gradtrail.support.signals import Stopped, stopping_on_sigterm

Section = TypeVar("Section")


@dataclass(frozen=True)
class Stage:
    """A stage of `dvc.yaml`, in the working folder.

    Attributes:
        name: also of its script, its params section and its metrics file.
    """

    name: str

    @cached_property
    def folder(self) -> Path:
        """The folder that deps and outs are relative to."""
        return working_folder()

    @cached_property
    def pipeline(self) -> dict[str, StageSpec]:
        """All stages."""
        return read_pipeline()

    @property
    def spec(self) -> StageSpec:
        """What `dvc.yaml` says of this one."""
        return self.pipeline[self.name]

    def params(self, into: type[Section], section: str | None = None) -> Section:
        """Load a section of `params.yaml`; by default the one of this stage's name."""
        return load_section(section or self.name, into)

    @cached_property
    def runtime(self) -> RuntimeConfig:
        """What cannot change an out."""
        return load_section("runtime", RuntimeConfig)

    @contextlib.contextmanager
    def writing_outs(self) -> Iterator[Path]:
        """Yield a folder to write all outs to; they come to their places together, when all are written.

        Raises:
            UserError: a debug switch is on, under which results have other bits than those that their state stands for.
        """
        compiles = "jax" in self.spec.params.get(str(VERSIONS), ())
        if compiles and (self.runtime.disable_jit or self.runtime.debug_nans):
            switch = "disable_jit" if self.runtime.disable_jit else "debug_nans"
            raise UserError(f"runtime.{switch} is on: the stage came to its end, and writes no results under it")
        with writing_outs(self.spec.outs, self.folder, self.name) as new:
            yield new

    def write_metrics(self, new: Path, metrics: Mapping[str, Any]) -> None:
        """Write the metrics file among the new outs: flat keys, numbers rounded to 9 digits."""
        write_json(new / "metrics" / f"{self.name}.json", {key: _plain(value) for key, value in metrics.items()})

    def read_metrics(self) -> dict[str, Any]:
        """Read the metrics file in its place."""
        metrics: dict[str, Any] = json.loads((self.folder / "metrics" / f"{self.name}.json").read_text())
        return metrics


def run_stage(main: Callable[[Stage], None], name: str) -> None:
    """Run a stage script and turn what went wrong into an exit status.

    0: done. 1: a fault of the program, with traceback. 2: a fault that a person can mend, in one line. 130: stopped by
    Ctrl-C. 143: by SIGTERM.
    """
    stage = Stage(name)
    try:
        require_own_code()
        require_recorded_versions(stage.spec.params.get(str(VERSIONS), ()))
        with stopping_on_sigterm(f"stopped; `dvc repro` makes {name} anew"):
            main(stage)
        warn_of_live_arrays(name)
    except (UserError, ConfigError, FloatingPointError) as error:  # the last: a training that diverged
        if isinstance(error, FloatingPointError) and stage.runtime.debug_nans:
            raise  # the traceback is what the switch is for
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as fault:
        if not (said := environment_error(fault)):
            raise
        print(f"{name}: {said}; results of before stand", file=sys.stderr)
        sys.exit(2)
    except Stopped as stop:
        print(f"{name}: {stop}", file=sys.stderr)
        sys.exit(128 + stop.number)
    except KeyboardInterrupt:
        print(f"{name}: stopped; `dvc checkout` brings the last results back", file=sys.stderr)
        sys.exit(130)


def _plain(value: Any) -> Any:
    """Turn a NumPy or JAX scalar into a number that reads well."""
    if isinstance(value, str | bool | int):
        return value
    if str(getattr(value, "dtype", "")).startswith("int"):
        return int(value)
    return float(f"{float(value):.9g}")
