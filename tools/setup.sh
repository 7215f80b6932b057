#!/usr/bin/env bash
# Puts everything that corefleet needs into .venv and its cache, from nothing.
#
#   tools/setup.sh [EXTRA...]      extras of pyproject.toml beside `dev`, e.g. bench
#
# Does nothing, fast, when nothing changed since the last time. Needs no root but for
# missing system packages: those it installs by apt as root or with a sudo that asks for
# no password, and otherwise names them and stops.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv
STAMP="$VENV/.corefleet-setup"
EXTRAS="dev"
for extra in "$@"; do EXTRAS="$EXTRAS,$extra"; done

say() { printf '%s\n' "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

# ---- what is installed already ----

key() {
    cat pyproject.toml constraints.txt tools/setup.sh tools/wheelhouse.py | sha256sum | cut -d' ' -f1
}

# The stamp's first line is the key, its second the extras, those of earlier runs included.
stamped_extras() { if [ -f "$STAMP" ]; then sed -n 2p "$STAMP"; fi; }
if [ -f "$STAMP" ]; then
    for extra in $(stamped_extras | tr ',' ' '); do
        case ",$EXTRAS," in *",$extra,"*) ;; *) EXTRAS="$EXTRAS,$extra" ;; esac
    done
fi
EXTRAS="$(tr ',' '\n' <<<"$EXTRAS" | sort -u | paste -sd,)"

CACHE="${COREFLEET_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/corefleet}"
if [ -f "$STAMP" ] && [ "$(sed -n 1p "$STAMP")" = "$(key)" ] && [ "$(stamped_extras)" = "$EXTRAS" ] &&
    [ -x "$VENV/bin/agentctl" ] && [ -x "$CACHE/bin/etcd" ] && command -v numactl >/dev/null; then
    exit 0
fi

# ---- system packages ----

python_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
        if command -v "$candidate" >/dev/null && python_is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

APT_IS_FRESH=""
apt_install() { # package...
    local root=""
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null && sudo -n true 2>/dev/null || return 1
        root="sudo -n"
    fi
    command -v apt-get >/dev/null || return 1
    say "installing by apt: $*"
    if [ -z "$APT_IS_FRESH" ]; then
        $root apt-get -qq -o DPkg::Lock::Timeout=300 update >&2 || say "apt-get update failed; trying with the lists that are there"
        APT_IS_FRESH=yes
    fi
    $root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 \
        install --no-install-recommends "$@" >&2
}

need() { # what is missing, Debian packages, Fedora-like packages
    [ -n "$2" ] || return 0
    # shellcheck disable=SC2086
    apt_install $2 && return
    say "missing: $1"
    say "  Debian, Ubuntu:    sudo apt-get install $2"
    say "  openEuler, Fedora: sudo dnf install $3"
    fail "install it and run this again"
}

PYTHON="$(find_python)"
MISSING="" DEBIAN="" FEDORA=""
missing() { MISSING="${MISSING:+$MISSING, }$1" DEBIAN="${DEBIAN:+$DEBIAN }$2" FEDORA="${FEDORA:+$FEDORA }$3"; }

[ -n "$PYTHON" ] || missing "Python 3.11 or newer" "python3 python3-venv" python3.11
if [ -n "$PYTHON" ] && ! "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null; then
    missing "Python's venv" python3-venv "$PYTHON"
fi
command -v numactl >/dev/null || missing numactl numactl numactl
if [ -z "$PYTHON" ] || ! "$PYTHON" -m tools.wheelhouse --find >/dev/null; then
    command -v g++ >/dev/null && command -v gcc >/dev/null || missing "a C++ compiler" "gcc g++" gcc-c++
    command -v cmake >/dev/null || missing cmake cmake cmake
    command -v make >/dev/null || command -v ninja >/dev/null || missing make make make
fi
need "$MISSING" "$DEBIAN" "$FEDORA"

PYTHON="$(find_python)"
[ -n "$PYTHON" ] || fail "Python 3.11 or newer is needed; this system's packages have only $(python3 --version)"

# ---- Python packages ----

if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
    say "creating $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv --clear "$VENV"
fi
rm -f "$STAMP"

WHEELS="$("$VENV/bin/python" -m tools.wheelhouse)"
say "installing Python packages, about a minute"
PIP_DISABLE_PIP_VERSION_CHECK=1 "$VENV/bin/python" -m pip install -qq \
    --constraint constraints.txt --find-links "$WHEELS" --editable ".[$EXTRAS]"
GGML_NO_BACKTRACE=1 "$VENV/bin/python" -c 'import llama_cpp' ||
    fail "llama-cpp-python was installed and does not import; remove $WHEELS and run this again"

# ---- etcd ----

"$VENV/bin/python" -m tools.etcd_fetch >&2

printf '%s\n%s\n' "$(key)" "$EXTRAS" >"$STAMP"
say "done"
