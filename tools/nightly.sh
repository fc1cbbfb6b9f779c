#!/usr/bin/env bash
# What takes longer than .ci/run may: random kills, long histories, many experiments, the commands of the docs.
# MNIST_DIR names a folder with the four files of MNIST; without it the tests on MNIST are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git describe --always --dirty 2>/dev/null || echo "no commit")
started=$(date +%s)
.venv/bin/python -m pytest -q -n auto --dist load -m nightly "$@"
echo "nightly: passed for $commit in $((($(date +%s) - started) / 60)) minutes, $(date -u +%Y-%m-%d)"
