#!/bin/sh
# Installs the Debian packages named, when root; otherwise says which are missing. A package that is
# called like its command is not missing where the command is there: npm, for one, often comes with
# another build of Node.js, beside which Debian's package cannot be installed.
set -eu

command -v cargo >/dev/null 2>&1 || {
    echo "sandbar: cargo is missing: install a Rust toolchain (1.95 or newer) first" >&2
    exit 1
}
command -v dpkg-query >/dev/null 2>&1 || exit 0 # not Debian: the build itself will name what it lacks

missing=
for package in "$@"; do
    ! command -v "$package" >/dev/null 2>&1 || continue
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ]; then
    echo "sandbar: these Debian packages are missing:$missing" >&2
    echo "         install them with: sudo apt-get install$missing" >&2
    exit 1
fi
echo "installing:$missing"
apt-get update -qq
# shellcheck disable=SC2086 # one word per package is what we want
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing
