#!/bin/sh
# Run a stage with the code of this folder and the interpreter of the project: `sh pipeline/stage.sh train`.
#
# This folder: a queued experiment runs in a copy, while an editable install names the repository; so `src` of the
# folder we stand in comes first on the path. `-P` leaves the folder itself out: a file such as `jax.py` in it is no module,
# and PYTHONSAFEPATH changes nothing. The interpreter: the first that has the packages of pipeline/versions.yaml, in
# these versions, of the active environment, the path and the repository's `.venv`; so that `.venv/bin/dvc repro` works
# in any shell. Where none has, the first that has the packages at all says which version is wrong.
#
# GRADTRAIL_LAUNCH: words that start several processes, put before the command of the training, which several can make; such as
# `srun -n 4`, or `python -m gradtrail.cluster.launch -n 2`.
set -eu
stage=$1
case $stage in
    train) launch=${GRADTRAIL_LAUNCH:-} ;;
    *) launch= ;;
esac
has_packages='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("jax", "mlflow", "safetensors"))))'
has_versions='
from importlib.metadata import version
for line in open("pipeline/versions.yaml"):
    name, _, wanted = line.partition("#")[0].partition(":")
    if name.strip() and version(name.strip()) != wanted.strip(" \"\n"):
        raise SystemExit(1)
'
for probe in "$has_versions" "$has_packages"; do
    for python in "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" python "${DVC_ROOT:-.}/.venv/bin/python" python3; do
        if [ -n "$python" ] && "$python" -P -c "$probe" 2>/dev/null; then
            export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
            if [ -n "$launch" ]; then # its `python` is to be this one
                PATH=$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH
            fi
            exec $launch "$python" -P "pipeline/$stage.py"
        fi
    done
done
echo "$stage: no python here has the project's packages; 'make env' installs them into .venv" >&2
exit 2
