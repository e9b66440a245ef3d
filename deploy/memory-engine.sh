#!/bin/sh
# Installs the memory engine that the tests of the memory guard run against into the directory named.
set -eu
needs=$(dirname "$0")/../integration/tests/memory/requirements.txt
python3 -m venv "$1"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$needs"
