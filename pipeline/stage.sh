#!/bin/sh
# Run a stage with the code of this folder and the interpreter of the project: `sh pipeline/stage.sh train`.
#
# This folder: a queued experiment runs in a copy, while an editable install names the repository; so `src` of the
# folder we stand in comes first on the path. The interpreter: that of the active environment, if it has the project's
# packages, else the repository's `.venv`, so that `.venv/bin/dvc repro` works in any shell.
set -eu
has_packages='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("jax", "flax", "mlflow", "safetensors"))))'
for python in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" python "${DVC_ROOT:-.}/.venv/bin/python" python3; do
    if [ -n "$python" ] && "$python" -c "$has_packages" 2>/dev/null; then
        PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m "pipeline.$1"
    fi
done
echo "$1: no python here has the project's packages; 'make env' installs them into .venv" >&2
exit 2
