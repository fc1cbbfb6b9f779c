"""The environment in which DVC, its workers and the stages find the interpreter of this process."""

import os
import sys
from pathlib import Path


def with_this_interpreter() -> dict[str, str]:
    """Return the environment of this process, with its own interpreter first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": sys.prefix}
