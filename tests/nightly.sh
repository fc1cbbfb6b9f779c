#!/usr/bin/env bash
# What takes longer than .ci/run may: random kills, long histories, many experiments, the commands of the docs.
# Property tests draw other examples each night; a failure prints the line that replays it.
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git describe --always --dirty 2>/dev/null || echo "no commit")
started=$(date +%s)
.venv/bin/python -m pytest -q -n auto --dist load -m "nightly or hypothesis" --hypothesis-profile=random
echo "nightly: passed for $commit in $((($(date +%s) - started) / 60)) minutes, $(date -u +%Y-%m-%d)"
