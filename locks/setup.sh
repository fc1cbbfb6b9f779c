#!/bin/sh
# Make the environment, if it is not current: `sh locks/setup.sh PYTHON VENV LOCK`. What is missing is named in one line.
# Without PYTHON, it is made with the newest suitable Python on the path, 3.14 last, or with one that uv finds or downloads.
set -eu
python=$1
venv=$2
lock=$3
remedy="install Python 3.11 to 3.13 (on Debian with python3-venv), or name one: make PYTHON=/path/to/python3.12 ..."

say() { echo "setup: $1" >&2; }
fail() {
    say "$1"
    exit 2
}
version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }
place_of() { cd "$1" 2>/dev/null && pwd -P; }

# Print why a Python cannot make the environment, or nothing.
fault_of() {
    case $(version_of "$1") in
    3.1[1-4].*) "$1" -c 'import venv, ensurepip' 2>/dev/null || echo "has no venv module" ;;
    "") command -v "$1" >/dev/null 2>&1 && echo "does not run" || echo "is not on the path" ;;
    *) echo "is $(version_of "$1"), not 3.11 to 3.14" ;;
    esac
}

# The environment says where it was made, and from which lock: one for GPUs or clusters stays that.
made_in= made_from=
if [ -s "$venv/.ready" ]; then { read -r made_in && read -r made_from; } <"$venv/.ready" || :; fi
[ "$lock" != locks/base.lock ] || lock=${made_from:-$lock}

if [ -n "$python" ]; then
    fault=$(fault_of "$python")
    [ -z "$fault" ] || fail "$python $fault; $remedy"
    [ "$(version_of "$python")" = "$(version_of "$venv/bin/python")" ] || made_in="another Python"
fi
if [ -n "$made_in" ] && [ "$made_in" != "$(place_of "$venv")" ]; then
    rm -rf "$venv"
elif [ "$made_from" = "$lock" ]; then
    [ -n "$(find "$lock" locks/base.lock locks/setup.sh pyproject.toml -newer "$venv/.ready")" ] || exit 0
fi

temporary=$(mktemp -d)
log=$temporary/log
trap 'rm -rf "$temporary"' EXIT
exec 3>&2
trap 'say "stopped; the same command starts again" 2>&3; exit 130' INT # also where the log gets what is said

# A terminal shows the installer's own progress; elsewhere what it says is kept, for the line that names a fault.
run() {
    if [ -t 2 ]; then "$@" >&2; else "$@" >"$log" 2>&1; fi
}
why() {
    [ -s "$log" ] || echo "see above"
    grep -m 1 -iE '^ *(error|×)' "$log" 2>/dev/null || tail -n 1 "$log" 2>/dev/null
}

began=$(date +%s)
if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
    rm -rf "$venv"
    faults=
    for name in python3.13 python3.12 python3.11 python3.14 python3 python; do # 3.14 was not tried
        [ -z "$python" ] || break
        command -v "$name" >/dev/null 2>&1 || continue
        fault=$(fault_of "$name")
        [ -n "$fault" ] || python=$name
        faults="${faults:+$faults; }$name $fault"
    done
    if [ -n "$python" ]; then
        say "creating $venv with Python $(version_of "$python") ($(command -v "$python"))"
        "$python" -m venv "$venv" >"$log" 2>&1 || fail "$python could not make the environment $venv: $(why)"
    else
        missing="no suitable Python on the path (${faults:-it has no python3})"
        command -v uv >/dev/null 2>&1 || fail "$missing, and no uv to download one; $remedy"
        run uv venv --seed --python ">=3.11,<3.14" "$venv" || fail "$missing, and uv failed: $(why); $remedy"
        say "created $venv with Python $(version_of "$venv/bin/python") from uv: $missing"
    fi
fi

pip() { run "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
uv_pip() { run "$venv/bin/uv" pip "$@" --python "$venv/bin/python"; }

# The locks are complete and hold the build backend: nothing is resolved, and nothing is built in isolation.
install_with() {
    say "installing $lock with ${1%_*}$2"
    "$1" install --no-deps --require-hashes -r "$lock" && "$1" install --no-deps --no-build-isolation --editable .
}
get_uv() {
    say "installing uv"
    awk '/^[^ ]/ { found = /^uv==/ } found' locks/base.lock >"$temporary/uv.lock"
    pip --retries 1 install --no-deps --require-hashes -r "$temporary/uv.lock"
}

# uv does not read pip's settings
index=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null || :)}}
[ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
{ get_uv && install_with uv_pip ""; } || {
    say "uv failed: $(why)"
    install_with pip ", which takes a minute or two" || fail "pip failed: $(why) (is a package index reachable?)"
}
printf '%s\n%s\n' "$(place_of "$venv")" "$lock" >"$venv/.ready"
say "$venv is ready after $(($(date +%s) - began)) s"
