#!/bin/sh
# Resolve all locks again: `make lock`, after a change of dependencies in pyproject.toml. Needs uv.
#
# Pinned by version and hash, for every Python and system that the project supports; without the address of any index.
set -eu
command -v uv >/dev/null 2>&1 || { echo "lock: no uv on the path; install it with: pip install uv" >&2; exit 2; }
compile() {
    uv pip compile pyproject.toml --universal --generate-hashes --no-header --no-emit-index-url --quiet --extra dev "$@"
}
# Write the packages that an extra adds to those of base.lock.
compile_difference() {
    compile --extra "$1" --constraints locks/base.lock --output-file "$2"
    added=$(awk 'NR == FNR { base[$0]; next } /^[^ ]/ { is_added = !($0 in base) } is_added' locks/base.lock "$2")
    printf '%s\n' "-r base.lock" "$added" >"$2"
}
compile --output-file locks/base.lock
compile_difference cuda13 locks/cuda.lock
compile_difference cluster locks/cluster.lock
# Hashes are those of base.lock, which uv reads as constraints.
uv pip compile --group serve --no-header --no-annotate --no-emit-index-url --quiet \
    --python-platform linux --constraints locks/base.lock --output-file locks/serve.lock
# For `gradtrail export`, an environment of its own in front of this one: jax2onnx allows no newer orbax-checkpoint
printf '%s\n' jax2onnx onnx onnx-ir onnxruntime sympy mpmath |
    uv pip compile - --no-deps --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
        --no-emit-index-url --quiet --output-file locks/onnx.lock
! grep -nE 'https?://' locks/*.lock
