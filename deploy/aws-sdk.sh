#!/bin/sh
# Installs the AWS SDK for Python that the tests of signatures run against: deploy/aws-sdk.sh [--check] DIRECTORY
# With --check it installs nothing, and its exit status tells whether the SDK is there.
set -eu
check=
if [ "${1-}" = --check ]; then
    check=yes
    shift
fi

! "$1/bin/python" -c 'import boto3, h2' 2>/dev/null || exit 0
[ -z "$check" ] || exit 1

needs=$(dirname "$0")/../integration/tests/hostile/aws/requirements.txt
echo "sandbar: installing the AWS SDK for the tests into $1, with pip:"
sed -n 's/^[^#[:space:]].*/    &/p' "$needs"
python3 -m venv "$1"
"$1/bin/python" -m pip install --quiet --disable-pip-version-check --requirement "$needs"
