#!/usr/bin/env bash
# Installs, by apt, the programs that only tests need: a virtual machine and a D-Bus daemon.
# Puts promtool into the cache (tools/prometheus_fetch.py).
#
# Does nothing where they are there. Elsewhere than on Debian and Ubuntu it names what is
# missing: the tests that need it fail then, or are skipped by COREFLEET_GUEST=skip.
set -euo pipefail

say() { printf '%s\n' "test programs: $*" >&2; }

MISSING=""
want() { # program, package
    PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null || MISSING="${MISSING:+$MISSING }$2"
}

want dbus-daemon dbus
if [ "${COREFLEET_GUEST:-}" != skip ]; then
    want "qemu-system-$(uname -m)" "$([ "$(uname -m)" = x86_64 ] && echo qemu-system-x86 || echo qemu-system-arm)"
    want qemu-img qemu-utils
    want mmdebstrap mmdebstrap
    want mkfs.ext4 e2fsprogs
    want ssh openssh-client
fi
.venv/bin/python -m tools.prometheus_fetch >&2 || say "tests of rules and alerts will fail"
[ -n "$MISSING" ] || exit 0

ROOT=""
if [ "$(id -u)" != 0 ]; then ROOT="sudo -n"; fi
if command -v apt-get >/dev/null && { [ -z "$ROOT" ] || sudo -n true 2>/dev/null; }; then
    say "installing by apt: $MISSING"
    $ROOT apt-get -qq -o DPkg::Lock::Timeout=300 update >&2 || say "apt-get update failed"
    # shellcheck disable=SC2086
    $ROOT env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 \
        install --no-install-recommends $MISSING >&2
else
    say "missing, install by your package manager: $MISSING"
fi
