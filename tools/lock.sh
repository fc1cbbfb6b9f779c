#!/bin/sh
# Resolve all locks anew: `make lock`, after a change of dependencies in pyproject.toml. Needs uv.
#
# Pinned by version and hash, for every Python and system that the project supports; without the address of any index.
set -eu
command -v uv >/dev/null 2>&1 || { echo "lock: no uv on the path; install it with: pip install uv" >&2; exit 2; }
compile() {
    uv pip compile pyproject.toml --universal --generate-hashes --no-header --no-emit-index-url --quiet "$@"
}
compile --extra dev --output-file requirements.lock
compile --extra dev --extra cuda13 --constraints requirements.lock --output-file requirements-cuda.lock
compile --extra dev --extra cluster --constraints requirements.lock --output-file requirements-cluster.lock
! grep -nE 'https?://' requirements.lock requirements-cuda.lock requirements-cluster.lock
