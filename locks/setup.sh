#!/bin/sh
# Make the environment: `sh locks/setup.sh PYTHON VENV LOCK`. What is missing is named in one line.
set -eu
python=$1
venv=$2
lock=$3

say() { echo "setup: $1" >&2; }
fail() {
    say "$1"
    exit 2
}

command -v "$python" >/dev/null 2>&1 ||
    fail "no $python on the path; install Python 3.11 to 3.13, or name one: make PYTHON=/path/to/python3.12 ..."
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
    fail "$python is $("$python" -c 'import platform; print(platform.python_version())'), but 3.11 to 3.13 is needed; name another: make PYTHON=/path/to/python3.12 ..."
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv module; on Debian: apt install python3-venv"

if [ -s "$venv/.ready" ]; then
    [ "$(head -n 1 "$venv/.ready")" = "$(cd "$venv" && pwd -P)" ] || rm -rf "$venv" # it came here from elsewhere
fi
if [ -s "$venv/.ready" ] && [ "$lock" = locks/base.lock ]; then
    lock=$(tail -n 1 "$venv/.ready") # an environment stays one for GPUs or clusters
fi
began=$(date +%s)
[ -x "$venv/bin/python" ] && "$venv/bin/python" -c 'import pip' 2>/dev/null || {
    say "creating $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null || fail "$python could not make the environment $venv"
}

temporary=$(mktemp -d)
log=$temporary/log
trap 'rm -rf "$temporary"' EXIT

# A terminal shows the installer's own progress; elsewhere what it says is kept, for the line that names a fault.
run() {
    if [ -t 2 ]; then "$@" >&2; else "$@" >"$log" 2>&1; fi
}
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
uv() { "$venv/bin/uv" "$@"; }
why() {
    [ -s "$log" ] || echo "see above"
    grep -m 1 -iE '^ *(error|×)' "$log" 2>/dev/null || tail -n 1 "$log" 2>/dev/null
}

# The locks are complete and hold the build backend: nothing is resolved, and nothing is built in isolation.
with_uv() {
    say "installing uv"
    awk '/^[^ ]/ { found = /^uv==/ } found' locks/base.lock >"$temporary/uv.lock"
    run pip --retries 1 install --no-deps --require-hashes -r "$temporary/uv.lock" || return
    # uv does not read pip's settings. Where it cannot link files from its cache, it would warn before it copies them.
    index=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(pip config get global.index-url 2>/dev/null)}}
    [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
    cache=$(uv cache dir 2>"$log") && mkdir -p "$cache" 2>"$log" && probe=$(mktemp "$cache/.probe.XXXXXX" 2>"$log") || return
    ln "$probe" "$venv/${probe##*/}" 2>/dev/null || export UV_LINK_MODE="${UV_LINK_MODE:-copy}"
    rm -f "$probe" "$venv/${probe##*/}"
    say "installing $lock with uv"
    run uv pip install --python "$venv/bin/python" --no-deps --require-hashes -r "$lock" &&
        run uv pip install --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
}

with_pip() {
    say "installing $lock with pip, which takes a minute or two"
    run pip install --no-deps --require-hashes -r "$lock" &&
        run pip install --no-deps --no-build-isolation --editable .
}

with_uv || {
    say "uv failed: $(why)"
    with_pip || fail "pip failed: $(why) (is a package index reachable?)"
}
printf '%s\n%s\n' "$(cd "$venv" && pwd -P)" "$lock" >"$venv/.ready"
say "$venv is ready after $(($(date +%s) - began)) s"
