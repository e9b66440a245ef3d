#!/bin/sh
# The story in one command: a policy is checked, asked, mistyped, changed. Exits 1 if a step misbehaves.
# Usage: deploy/demo.sh path/to/sandbar
set -eu
sandbar=$1
cd "$(dirname "$0")/.."
policy=deploy/gateway/policies/build-agent.toml
failed=0

# step STATUS WHAT ARGUMENTS...: says what is tried, runs it, and minds the exit status.
step() {
    wanted=$1
    printf '\n── %s\n$ sandbar' "$2"
    shift 2
    printf ' %s' "$@"
    printf '\n'
    status=0
    "$sandbar" "$@" 2>&1 || status=$?
    if [ "$status" -ne "$wanted" ]; then
        echo "demo: expected exit status $wanted, got $status" >&2
        failed=1
    fi
}

step 0 'A policy is checked, and prints what each pattern covers' check "$policy"
step 0 'What it names is allowed' explain -p "$policy" https://github.com/rust-lang/rust
step 1 'The same host with another method is not, and the answer says what to change' explain -p "$policy" --method POST https://github.com/rust-lang/rust
step 1 'A name that only looks like an allowed one' explain -p "$policy" https://githup.com/rust-lang/rust
step 1 'An address written as a number, which some programs would dial' explain -p "$policy" https://2130706433/
step 1 'A path that some servers read as another' explain -p "$policy" --method POST 'https://api.openai.com/v1/..%2fadmin'
step 2 'A file with slips is refused whole, each slip with its place' check deploy/examples/slips.toml
step 0 'What an edit would open and close' diff "$policy" deploy/examples/build-agent-next.toml
step 0 'Policies carry their own tests' test "$policy"
step 0 'A gateway of two sandboxes, with layers, memory banks and a database' check deploy/gateway

echo
[ "$failed" -eq 0 ] && echo "demo: every step behaved" || { echo "demo: a step misbehaved" >&2; exit 1; }
