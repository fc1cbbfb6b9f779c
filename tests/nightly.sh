#!/usr/bin/env bash
# What takes longer than .ci/run may: random kills, long histories, many experiments, the commands of the docs.
# Property tests draw other examples each night; a failure prints the line that replays it.
set -euo pipefail
cd "$(dirname "$0")/.."
# The image of the server is built and started where Debian's podman is to be had; else these tests are skipped.
if ! command -v podman > /dev/null && command -v apt-get > /dev/null; then
    timeout 300 apt-get install -y --no-install-recommends podman crun mmdebstrap > /dev/null 2>&1 || true
fi
commit=$(git describe --always --dirty 2>/dev/null || echo "no commit")
started=$(date +%s)
.venv/bin/python -m pytest -v -n auto --dist loadscope --no-loadscope-reorder -m "nightly or hypothesis" --hypothesis-profile=random --durations=20
echo "nightly: passed for $commit in $((($(date +%s) - started) / 60)) minutes, $(date -u +%Y-%m-%d)"
