#!/bin/sh
# Installs the missing ones of some Debian packages, after naming them: deploy/needs.sh [--check] PACKAGE...
# With --check it installs nothing, and its exit status tells whether any is missing.
#
# Without root it prints the command to run instead. A command of the package's name counts as the package: npm,
# for one, often comes with another build of Node.js, and Debian's package conflicts with that.
set -eu

check=
if [ "${1-}" = --check ]; then
    check=yes
    shift
fi

if ! command -v cargo >/dev/null 2>&1; then
    [ -z "$check" ] || exit 1
    echo "sandbar: cargo is missing: install a Rust toolchain, 1.95 or newer, with rustup" >&2
    exit 1
fi

missing=
for package in "$@"; do
    ! command -v "$package" >/dev/null 2>&1 || continue
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done

if [ -z "$missing" ]; then
    [ -n "$check" ] || echo "sandbar: every Debian package needed is installed"
    exit 0
elif ! command -v apt-get >/dev/null 2>&1; then
    # Not Debian: no name here proves anything missing, and the build or the test that lacks something says so.
    [ -n "$check" ] || echo "sandbar: this is not Debian: install what your system calls$missing"
    exit 0
elif [ -n "$check" ]; then
    exit 1
fi

install="apt-get install --no-install-recommends$missing"
if [ "$(id -u)" -ne 0 ]; then
    echo "sandbar: these Debian packages are missing:$missing" >&2
    echo "sandbar: only root can install them; run:" >&2
    echo "    sudo apt-get update && sudo $install" >&2
    exit 1
fi
echo "sandbar: installing these Debian packages:$missing"
apt-get update -qq
# shellcheck disable=SC2086 # one word per package is what we want
DEBIAN_FRONTEND=noninteractive $install -q -y
