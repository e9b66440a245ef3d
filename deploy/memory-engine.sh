#!/bin/sh
# Installs the memory engine that the tests of the memory guard run against: deploy/memory-engine.sh [--check] DIRECTORY
# With --check it installs nothing, and its exit status tells whether the engine is there.
set -eu
check=
if [ "${1-}" = --check ]; then
    check=yes
    shift
fi

! "$1/bin/python" -c 'import astrocyte' 2>/dev/null || exit 0
[ -z "$check" ] || exit 1

needs=$(dirname "$0")/../integration/tests/memory/requirements.txt
echo "sandbar: installing a memory engine for the tests into $1, with pip:"
sed -n 's/^[^#[:space:]].*/    &/p' "$needs"
python3 -m venv "$1"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$needs"
