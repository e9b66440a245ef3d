#!/bin/sh
# Installs the clients of model services that the tests of `sandbar run` use: deploy/model-clients.sh [--check] DIRECTORY
# With --check it installs nothing, and its exit status tells whether they are there.
set -eu
check=
if [ "${1-}" = --check ]; then
    check=yes
    shift
fi

node='openai@7.55.0 @anthropic-ai/sdk@1.10.0 @anthropic-ai/claude-code@2.1.328'
python='openai==3.51.0 anthropic==2.10.0'

# Written last, so that an installation that was interrupted begins again.
[ "$(cat "$1/installed" 2>/dev/null)" != "$node $python" ] || exit 0
[ -z "$check" ] || exit 1

echo "sandbar: installing clients of model services for the tests into $1, with npm and pip:"
printf '    %s\n' $node $python
rm -rf "$1"
mkdir -p "$1"
npm install --prefix "$1" --no-audit --no-fund --no-package-lock --loglevel=error $node
# Debian's own Python: the tests run these clients as a user who may have no access to another one.
/usr/bin/python3 -m venv "$1/python"
"$1/python/bin/python" -m pip install --quiet --disable-pip-version-check $python
echo "$node $python" >"$1/installed"
