#!/bin/sh
# True- and false-alarm rates of the signals, per detector: integration/benches/signals.sh target/release/sandbar [PATTERN]
#
# A benign corpus of real tools and an exfiltration corpus run through `sandbar serve` with its defaults. About a third
# of each is held back from tuning and has columns of its own. PATTERN chooses items.
# It takes up to four minutes and always ends with status 0: it measures.
#
# Everything runs on the loopback of a network namespace of its own, except that the vendors' SDKs are fetched once,
# into target/signals-sdk. Without them their items are listed as not run.
set -eu

here=$(dirname "$(realpath "$0")")
sdk="$here/../../target/signals-sdk"
if [ -z "${SANDBAR_BENCH_INSIDE:-}" ]; then
    "$here/../../deploy/needs.sh" chromium curl git iproute2 libfaketime libnss3-tools nodejs npm openssl python3 \
        python3-aiohttp python3-grpcio python3-httpx python3-pip python3-requests python3-venv wget
    if [ ! -e "$sdk/complete" ]; then
        echo 'signals: fetching the SDKs of OpenAI, Anthropic, AWS and OpenTelemetry, once'
        /usr/bin/python3 -m venv --system-site-packages "$sdk"
        if timeout 300 "$sdk/bin/pip" install -q --disable-pip-version-check -r "$here/signals/requirements.txt"; then
            touch "$sdk/complete"
        else
            echo 'signals: the SDKs cannot be fetched; their items will not run' >&2
        fi
    fi
    namespaces=-n
    [ "$(id -u)" -eq 0 ] || namespaces=-rn
    SANDBAR_BENCH_INSIDE=1 exec unshare "$namespaces" "$0" "$@"
fi
ip link set lo up
exec timeout -k 10 300 /usr/bin/python3 -B "$here/signals/measure.py" "$(realpath "$1")" "$sdk/bin/python" "${2:-*}"
