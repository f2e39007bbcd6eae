# Sourced by scripts/test, scripts/check and .ci/run: finds a Python and keeps a virtual environment.
# Plain bash (3.2 and later); it knows nothing of what is run in the environment.
# shellcheck shell=bash

# zkv_probe PYTHON [X.Y]: does this interpreter start, and is it new enough (or exactly X.Y)?
# Starting it matters: a version manager's stand-in is on PATH and fails when it is called.
zkv_probe() {
    "$1" -c '
import sys
wanted = sys.argv[1] if len(sys.argv) > 1 else ""
found = "%d.%d" % sys.version_info[:2]
sys.exit(found != wanted if wanted else sys.version_info < (3, 11))
' ${2:+"$2"} >/dev/null 2>&1
}

# zkv_find_python [X.Y]: prints an interpreter of that version, or of any version that zkv supports.
# ZKV_PYTHON, when set, is the answer to the second question.
zkv_find_python() {
    local wanted="${1:-}" candidate version
    if [ -z "$wanted" ] && [ -n "${ZKV_PYTHON:-}" ]; then
        if zkv_probe "$ZKV_PYTHON"; then
            printf '%s\n' "$ZKV_PYTHON"
            return 0
        fi
        echo "zkv: ZKV_PYTHON=$ZKV_PYTHON does not start or is older than Python 3.11" >&2
        return 1
    fi
    for version in ${wanted:-3.11 3.12 3.13 3.14}; do
        for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
            if zkv_probe "$candidate" "$version"; then
                printf '%s\n' "$candidate"
                return 0
            fi
        done
    done
    for candidate in python3 python; do
        if zkv_probe "$candidate" "$wanted"; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    if [ -z "$wanted" ]; then
        echo "zkv: no Python 3.11 or newer here (tried python3.11 to python3.14, python3 and python)." >&2
        echo "zkv: install one, or name it: ZKV_PYTHON=/path/to/python3" >&2
    fi
    return 1
}

# zkv_pip DIR ARGUMENT...: installs quietly; only errors are printed, not an index's remarks.
zkv_pip() {
    local dir="$1"
    shift
    "$dir/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$@"
}

# zkv_make_venv PYTHON DIR: makes the environment, with a pip that knows dependency groups.
zkv_make_venv() {
    local python="$1" dir="$2"
    if [ -x "$dir/bin/python" ] && [ -e "$dir/.zkv-made" ]; then
        return 0
    fi
    # Only what was begun here is ever removed: a folder that somebody names may be anything.
    if [ -e "$dir/.zkv-begun" ]; then
        rm -rf "$dir"
    elif [ -n "$(ls -A "$dir" 2>/dev/null)" ]; then
        echo "zkv: $dir has files in it and is no environment that zkv has made; name another folder" >&2
        return 1
    fi
    mkdir -p "$dir" && : >"$dir/.zkv-begun" || return 1
    if ! "$python" -m venv "$dir"; then
        echo "zkv: $python cannot make a virtual environment in $dir." >&2
        echo "zkv: on Debian and Ubuntu its venv module is a package of its own: python3-venv" >&2
        return 1
    fi
    zkv_pip "$dir" --upgrade 'pip>=25.1' || return 1
    mv "$dir/.zkv-begun" "$dir/.zkv-made"
}

# zkv_venv ROOT DIR GROUP: an environment with zkv itself (editable) and one dependency group.
# A second call with the same pyproject.toml installs nothing.
zkv_venv() {
    local root="$1" dir="$2" group="$3" python stamp
    stamp="$(cksum <"$root/pyproject.toml") $root"
    if [ -x "$dir/bin/python" ] && [ "$(cat "$dir/.zkv-$group" 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    echo "zkv: installing zkv and its '$group' packages into $dir (once; a minute or two)" >&2
    if [ ! -x "$dir/bin/python" ] || [ ! -e "$dir/.zkv-made" ]; then
        python="$(zkv_find_python)" || return 1
        zkv_make_venv "$python" "$dir" || return 1
    fi
    zkv_pip "$dir" --editable "$root" --group "$root/pyproject.toml:$group" || return 1
    printf '%s' "$stamp" >"$dir/.zkv-$group"
}

# zkv_extra ROOT DIR EXTRA REQUIREMENT: adds an extra of zkv, and a package by its own name, to an
# environment that zkv_venv has made; a second call with the same pyproject.toml installs nothing.
zkv_extra() {
    local root="$1" dir="$2" extra="$3" requirement="$4" stamp
    stamp="$(cksum <"$root/pyproject.toml") $root $requirement"
    if [ "$(cat "$dir/.zkv-$extra" 2>/dev/null)" = "$stamp" ]; then
        return 0
    fi
    echo "zkv: installing $requirement into $dir (once; it is large)" >&2
    zkv_pip "$dir" --editable "$root[$extra]" "$requirement" || return 1
    printf '%s' "$stamp" >"$dir/.zkv-$extra"
}
