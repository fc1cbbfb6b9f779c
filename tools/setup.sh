#!/bin/sh
# Make the environment: `sh tools/setup.sh PYTHON VENV LOCK`. What is missing is named in one line.
set -eu
python=$1
venv=$2
lock=$3

fail() {
    echo "setup: $1" >&2
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
if [ -s "$venv/.ready" ] && [ "$(tail -n 1 "$venv/.ready")" = requirements-cuda.lock ]; then
    lock=requirements-cuda.lock
fi
[ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null || {
    rm -rf "$venv"
    "$python" -m venv "$venv" >/dev/null || fail "$python could not make the environment $venv"
}

echo "setup: installing $lock into $venv; this takes a minute or two, once" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# No build isolation: the lock holds the build backend too.
if ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r "$lock" >"$log" 2>&1 ||
    ! "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . >"$log" 2>&1; then
    fail "$(python_says=$(grep -m 1 -E '^ERROR' "$log" || tail -n 1 "$log"); echo "pip failed: $python_says (is a package index reachable?)")"
fi
printf '%s\n%s\n' "$(cd "$venv" && pwd -P)" "$lock" >"$venv/.ready"
