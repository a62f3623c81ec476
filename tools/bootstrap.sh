# Sourced by tools/check and tools/demo: `bootstrap` makes .venv what this commit needs.
#
# Sets ROOT (the repository), PY (the environment's Python) and NAME (who complains).
# A stamp in .venv holds a hash of what was installed from; while it matches, nothing is done.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
PY=$VENV/bin/python
LOG=$ROOT/.venv.log
STAMP=$VENV/.lmdbstore-stamp
NAME=$(basename "$0")
# albumentations otherwise asks the network for its newest version at every import
export NO_ALBUMENTATIONS_UPDATE=1

say() { printf '%s: %s\n' "$NAME" "$*" >&2; }
die() { say "$*"; exit 1; }

# A Python that setup.cfg allows: $PYTHON, else the first of the usual names.
find_python() {
    local candidate candidates=(python3 python3.13 python3.12 python3.11 python3.10)
    [ -z "${PYTHON-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
            && { echo "$candidate"; return; }
    done
    die "no Python 3.10 to 3.13 among: ${candidates[*]}; set PYTHON=/path/to/python3.12"
}

# Everything that decides what lies in .venv; the path too, since scripts in it name it.
fingerprint() {
    local hash
    hash=$(cat "$ROOT/setup.cfg" "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "${BASH_SOURCE[0]}" | cksum)
    echo "$hash $ROOT $("$1" -c 'import sys; print(sys.version, sys.prefix)' | tr -d '\n')"
}

# Run a step of the set-up: silent when it works, one line and the log's name when it doesn't.
step() {
    local what=$1
    shift
    say "$what ..."
    "$@" >>"$LOG" 2>&1 || die "$what failed: $(reason) (all of it: $LOG)"
}

# The line of the log that says why: pip's last ERROR, or whatever came last.
reason() { { grep '^ *ERROR: ' "$LOG" || cat "$LOG"; } | tail -n 1; }

make_venv() {
    local python=$1
    [ -w "$ROOT" ] || die "cannot write to $ROOT"
    : >"$LOG"
    # `venv` repairs what an interrupted run left, and clears another Python's environment
    if [ "$("$PY" -c 'import sys; print(sys.version)' 2>/dev/null)" = "$("$python" -c 'import sys; print(sys.version)')" ]; then
        step "refreshing .venv" "$python" -m venv "$VENV"
    else
        step "making .venv with $("$python" --version)" "$python" -m venv --clear "$VENV"
    fi
    step "installing the dependencies (PyTorch is large: minutes, the first time)" \
        "$PY" -m pip install --disable-pip-version-check -c "$ROOT/constraints.txt" -e "$ROOT[dev]"
}

has_turbojpeg() { "$PY" -c 'from turbojpeg import TurboJPEG; TurboJPEG()' >/dev/null 2>&1; }

# The fast JPEG decoder comes with the system, not with pip; without it OpenCV decodes.
install_turbojpeg() {
    has_turbojpeg && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing libturbojpeg ..."
        { apt-get install -y -qq libturbojpeg0 || { apt-get update -qq && apt-get install -y -qq libturbojpeg0; } \
            || apt-get install -y -qq libturbojpeg; } >>"$LOG" 2>&1 </dev/null
    fi
    has_turbojpeg || say "note: no libturbojpeg here, so OpenCV decodes (slower); on Debian/Ubuntu: sudo apt-get install libturbojpeg0"
}

# want COMMAND PACKAGE WHAT: a program that apt may bring; without it WHAT is said.
want() {
    command -v "$1" >/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $2 ..."
        { apt-get install -y -qq "$2" || { apt-get update -qq && apt-get install -y -qq "$2"; }; } >>"$LOG" 2>&1 </dev/null
    fi
    command -v "$1" >/dev/null || say "note: no $1 here, so $3 (Debian/Ubuntu: sudo apt-get install $2)"
}

bootstrap() {
    local python
    python=$(find_python) || exit 1
    if [ ! -x "$PY" ] || [ "$(cat "$STAMP" 2>/dev/null)" != "$(fingerprint "$python")" ]; then
        rm -f "$STAMP"
        make_venv "$python"
        fingerprint "$python" >"$STAMP"
    fi
    install_turbojpeg
}
