#!/bin/sh
# Make the environment: `sh locks/setup.sh PYTHON VENV LOCK`. What is missing is named in one line.
# Without PYTHON, it is made with the newest Python on the path that was tried, or with one that uv finds or downloads.
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

# Print why a Python cannot make the environment, or nothing.
fault_of() {
    case $(version_of "$1") in
    3.1[1-4].*) "$1" -c 'import venv, ensurepip' 2>/dev/null || echo "has no venv module" ;;
    "") echo "does not run" ;; # such as a shim of pyenv for a version that is not selected
    *) echo "is $(version_of "$1"), not 3.11 to 3.14" ;;
    esac
}

# Print the path of the first suitable Python, or fail and print why each is not suitable.
find_python() {
    faults=
    IFS=:
    for name in python3.13 python3.12 python3.11 python3.14 python3 python; do # 3.14 was not tried
        for folder in $PATH; do
            [ -x "$folder/$name" ] || continue
            fault="$name $(fault_of "$folder/$name")"
            [ "$fault" != "$name " ] || { echo "$folder/$name" && return; }
            case $faults in *"$fault"*) ;; *) faults="${faults:+$faults; }$fault" ;; esac
        done
    done
    echo "${faults:-it has no python3}"
    return 1
}

if [ -n "$python" ]; then
    command -v "$python" >/dev/null 2>&1 || fail "no $python on the path; $remedy"
    fault=$(fault_of "$python")
    [ -z "$fault" ] || fail "$python $fault; $remedy"
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

if [ -s "$venv/.ready" ]; then
    [ "$(head -n 1 "$venv/.ready")" = "$(cd "$venv" && pwd -P)" ] || rm -rf "$venv" # it came here from elsewhere
fi
if [ -s "$venv/.ready" ] && [ "$lock" = locks/base.lock ]; then
    lock=$(tail -n 1 "$venv/.ready") # an environment stays one for GPUs or clusters
fi
# A Python that PYTHON names replaces one of another version
[ -z "$python" ] || [ "$(version_of "$python")" = "$(version_of "$venv/bin/python")" ] || rm -rf "$venv"
began=$(date +%s)
"$venv/bin/python" -c 'import pip' 2>/dev/null || {
    rm -rf "$venv"
    [ -n "$python" ] && reason="which PYTHON names" || reason="the first of 3.13, 3.12, 3.11 and 3.14 on the path"
    if python=${python:-$(find_python)}; then
        version=$(version_of "$python")
        case $version in 3.14.*) reason="$reason; 3.14 was not tried" ;; esac
        say "creating $venv with Python $version ($(command -v "$python")), $reason"
        "$python" -m venv "$venv" >"$log" 2>&1 || fail "$python could not make the environment $venv: $(why)"
    else
        missing="no suitable Python on the path ($python)"
        command -v uv >/dev/null 2>&1 || fail "$missing, and no uv to download one; $remedy"
        run uv venv --seed --python ">=3.11,<3.14" "$venv" || fail "$missing, and uv failed: $(why); $remedy"
        say "created $venv with Python $(version_of "$venv/bin/python") from uv: $missing"
    fi
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
uv() { "$venv/bin/uv" "$@"; }

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
