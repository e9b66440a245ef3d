"""The benign corpus: real tools, run as people run them. An alarm here is a false one."""

import json
import os
import subprocess
from pathlib import Path

import samples

HERE = Path(__file__).parent
TIMEOUT = 60
SDKS = ["anthropic", "boto3", "openai", "opentelemetry"]

# Functions of tools.py, and the SDK that each needs.
LIBRARIES = {
    "aiohttp_many": None, "anthropic_stream": "anthropic", "anthropic_tools": "anthropic", "grpc_calls": None,
    "grpc_stream": None, "heartbeat": None, "openai_chat": "openai", "openai_embeddings": "openai",
    "openai_stream": "openai", "openai_vision": "openai", "otel_metrics": "opentelemetry",
    "otel_traces": "opentelemetry", "poll_jobs": None, "registry_pull": None, "requests_graphql": None,
    "requests_login": None, "requests_pages": None, "s3_multipart": "boto3", "s3_objects": "boto3",
    "s3_presigned": "boto3", "searches": None, "signed_downloads": None, "traced_calls": None,
}

# The same of held_tools.py.
HELD_LIBRARIES = {
    "block_uploads": None, "cluster_watch": None, "cookiejar_login": None, "cursor_pagination": None,
    "dynamo_items": "boto3", "etag_revalidation": None, "gcs_resumable": None, "geocoding": None, "github_api": None,
    "jsonrpc_polling": None, "long_polling": None, "mcp_session": None, "metrics_push": None, "module_proxy": None,
    "oauth_pkce": None, "otel_logs": None, "queue_messages": "boto3", "s3_parts_and_presigned_puts": "boto3",
    "search_cluster": None, "sentry_envelopes": None, "server_sent_events": None, "tus_upload": None,
    "websocket_handshakes": None,
}

# Commands of a shell in an empty directory, which is HOME. `$DATA` is a file of 300 kB.
SHELL = {
    "curl_chunked": "for n in $(seq 8); do curl -sSf -T - -o /dev/null https://web.example/api/upload/$n < $DATA; done",
    "curl_download": "for n in $(seq 6); do curl -sSf -L -o out https://downloads.example/latest/$n; "
                     "curl -sSf -r $((n * 1000))-$((n * 1000 + 999)) -o out https://downloads.example/release.tar.gz; done",
    "curl_form": "for n in $(seq 8); do curl -sSf -o /dev/null -F name=report$n -F file=@$DATA https://web.example/api/files; done",
    "curl_json": "for n in $(seq 20); do curl -sSf -o /dev/null -H 'Content-Type: application/json' "
                 "-d \"{\\\"run\\\": $n, \\\"state\\\": \\\"passed\\\"}\" https://web.example/api/runs; done",
    "curl_put": "for n in $(seq 8); do curl -sSf -o /dev/null -T $DATA https://web.example/api/artifacts/build-$n.bin; done",
    "cargo_fetch": "mkdir -p app/src .cargo && cd app && echo 'fn main() {}' > src/main.rs && "
                   "printf '[package]\\nname = \"app\"\\nversion = \"0.1.0\"\\nedition = \"2021\"\\n[dependencies]\\n%s = \"1\"\\n' "
                   "$CRATE > Cargo.toml && cargo -q fetch",
    "git_clone": "git clone -q https://github.com/acme/app.git a && git clone -q --depth 1 https://github.com/acme/app.git b && "
                 "for n in 1 2 3 4 5; do git -C a fetch -q; done; git ls-remote -q https://github.com/acme/app.git",
    "git_push": "git clone -q https://$GIT_USER@github.com/acme/app.git a && cd a && git checkout -q -b topic-$$ && "
                "for n in $(seq 6); do head -c 40000 /dev/urandom > new-$n; git add .; "
                "git -c user.name=a -c user.email=a@web.example commit -qm change-$n; git push -q origin HEAD; done",
    "node_fetch": "node fetch.js",
    "npm_install": "npm install --no-fund --loglevel=error --cache cache $PACKAGE && rm -rf node_modules cache && "
                   "npm ci --no-fund --loglevel=error --cache cache && npm audit --loglevel=error >/dev/null",
    "npm_view": "printf '//npm.example/:_authToken=%s\\n' $NPM_TOKEN >> .npmrc; "
                "for name in $PACKAGES; do npm view --cache cache $name version >/dev/null; done",
    "pip_install": "$PYTHON -m pip install -q --no-input --disable-pip-version-check --no-cache-dir --target lib "
                   "--index-url https://index.example/simple/ $WHEEL",
    "pip_download": "$PYTHON -m pip download -q --no-input --disable-pip-version-check -d got "
                    "--index-url https://index.example/simple/ $WHEELS && "
                    "$PYTHON -m pip download -q --no-input --disable-pip-version-check -d again "
                    "--index-url https://index.example/simple/ $WHEELS",
    "wget_mirror": "wget -q -r -l 1 -np https://web.example/ || [ $? -eq 8 ]",
    "chromium_page": "chromium $BROWSER --dump-dom https://web.example/ | grep -q after",
    "chromium_pages": "for page in apple bridge butter; do chromium $BROWSER --dump-dom "
                      "https://web.example/page/$page.html?utm_source=mail | grep -q after; done",
}

# Held back from tuning.
HELD_SHELL = {
    "chromium_revisit": "for n in 1 2 3; do chromium $BROWSER --dump-dom https://web.example/?visit=$n | grep -q after; done",
    "curl_cookie_jar": "curl -sSf -c jar -b jar -o page https://login.example/login; "
                       "curl -sSf -c jar -b jar -o page -d user=ann -d csrf=$(sed 's/.*value=\"//; s/\".*//' page | head -1) "
                       "https://login.example/login; for n in $(seq 25); do curl -sSf -c jar -b jar -o page "
                       "https://login.example/account/orders?page=$n; done",
    "curl_etags": "for n in $(seq 6); do for name in apple bridge butter; do curl -sSf --etag-save $name.etag "
                  "$(test -s $name.etag && echo --etag-compare $name.etag) -o $name https://feeds.example/feed/$name.xml; done; done",
    "curl_ranges": "for n in $(seq 0 39); do curl -sSf -r $((n * 1200))-$((n * 1200 + 1199)) -o part.$n "
                   "https://downloads.example/release.tar.gz; done",
    "git_branches": "git clone -q https://$GIT_USER@github.com/acme/app.git a && cd a && for n in 1 2 3 4; do "
                    "git checkout -q -b feature/$n-$$; echo $n > note-$n; git add .; git -c user.name=a -c user.email=a@web.example "
                    "commit -qm note-$n; git push -q origin HEAD; git tag v$n-$$; git push -q origin v$n-$$; done; "
                    "git fetch -q --prune --tags; git push -q origin --delete feature/1-$$",
    "npm_outdated": "npm install --no-fund --loglevel=error --cache cache $PACKAGES && npm audit --loglevel=error >/dev/null; "
                    "npm outdated >/dev/null || true; npm ls >/dev/null; npm audit --json >/dev/null",
    "pip_extras": "$PYTHON -m pip download -q --no-input --disable-pip-version-check -d got "
                  "--index-url https://index.example/simple/ $WHEEL[more] && printf '%s\\n' $WHEELS > needs.txt && "
                  "$PYTHON -m pip install -q --no-input --disable-pip-version-check --no-cache-dir --target lib "
                  "--index-url https://index.example/simple/ -r needs.txt",
    "wget_recursive": "wget -q -r -l 2 -np -N --load-cookies jar --save-cookies jar https://web.example/page/apple.html || [ $? -eq 8 ]",
}

NODE = """
const http = require('http'), https = require('https'), tls = require('tls');
const proxy = new URL(process.env.HTTPS_PROXY);
const ask = (path, body) => new Promise((done, fail) => {
  const connect = http.request({host: proxy.hostname, port: proxy.port, method: 'CONNECT', path: 'web.example:443',
    headers: {Host: 'web.example:443'}});
  connect.on('connect', (_, socket) => {
    const options = {host: 'web.example', path, method: body ? 'POST' : 'GET',
      agent: Object.assign(new https.Agent(), {createConnection: () => tls.connect({socket, servername: 'web.example'})}),
      headers: {'User-Agent': 'node', 'Content-Type': 'application/json'}};
    const request = https.request(options, answer => answer.resume().on('end', done)).on('error', fail);
    request.end(body);
  }).on('error', fail).end();
});
(async () => { for (let at = 0; at < 30; at++) await ask('/api/items?page=' + at, at % 3 ? null : '{"at":' + at + '}'); })();
"""


def names():
    return sorted([*LIBRARIES, *HELD_LIBRARIES, *SHELL, *HELD_SHELL])


def is_held_back(name):
    return name in HELD_LIBRARIES or name in HELD_SHELL


def missing(name, sdks):
    """Says why an item cannot run, if it cannot."""
    sdk = (LIBRARIES | HELD_LIBRARIES).get(name)
    if sdk and sdk not in sdks:
        return f"the Python package {sdk} is not installed"
    program = name.split("_")[0]
    if name in SHELL | HELD_SHELL and program in ("cargo", "chromium", "curl", "git", "node", "npm", "wget"):
        found = subprocess.run(["sh", "-c", f"command -v {program}"], capture_output=True)
        if found.returncode:
            return f"{program} is not installed"
    return None


def installed_sdks(python):
    check = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"
    run = subprocess.run([python, "-c", check, *SDKS], capture_output=True, text=True, timeout=TIMEOUT)
    return run.stdout.split()


def run_item(name, port, world, trust, python, directory, timeout=TIMEOUT):
    """Runs one item to its end; returns what it complained of, or nothing."""
    home = directory / "home" / name
    home.mkdir(parents=True)
    data = home / "data.bin"
    proxy = f"http://127.0.0.1:{port}"
    drawn = samples.Samples(name)
    data.write_bytes(drawn.bytes(300_000))
    keep = {key: os.environ[key] for key in ("PATH", "RUSTUP_HOME", "CARGO_HOME", "RUSTUP_TOOLCHAIN") if key in os.environ}
    env = {**keep, **trust, "HOME": str(home), "LANG": "C.UTF-8", "DATA": str(data), "PYTHON": "/usr/bin/python3",
           **{key: proxy for key in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "grpc_proxy")},
           "GRPC_DNS_RESOLVER": "native", "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1",
           "PYTHONDONTWRITEBYTECODE": "1",
           "RUSTUP_HOME": os.environ.get("RUSTUP_HOME", str(Path.home() / ".rustup"))}
    if name in LIBRARIES | HELD_LIBRARIES:
        command = [python, str(HERE / ("tools.py" if name in LIBRARIES else "held_tools.py")), name]
    else:
        prepare(name, home, env, world, drawn)
        command = ["sh", "-ec", (SHELL | HELD_SHELL)[name]]
    try:
        run = subprocess.run(command, cwd=home, env=env, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"took longer than {timeout} s"
    said = (run.stdout + run.stderr).decode("utf-8", "replace").strip()
    return f"exit status {run.returncode}: {said[-600:]}" if run.returncode else None


def prepare(name, home, env, world, drawn):
    """Writes the settings of the tools."""
    env["WHEEL"], env["WHEELS"] = list(world.wheels)[0], " ".join(list(world.wheels)[2:8])
    env["PACKAGE"], env["PACKAGES"] = list(world.tarballs)[0], " ".join(list(world.tarballs)[3:10])
    env["CRATE"] = list(world.crates)[0]
    env["NPM_TOKEN"] = drawn.crc_token("npm_")
    env["GIT_USER"] = "agent:" + drawn.crc_token("ghp_")
    (home / ".npmrc").write_text("registry=https://npm.example/\nupdate-notifier=false\nfetch-retries=0\n")
    (home / "package.json").write_text(json.dumps({"name": "app", "version": "1.0.0"}))
    (home / "fetch.js").write_text(NODE)
    if name.startswith("cargo"):
        env["CARGO_HOME"] = str(home / ".cargo")
        env["CARGO_HTTP_CAINFO"], env["CARGO_HTTP_PROXY"] = env["SSL_CERT_FILE"], env["HTTPS_PROXY"]
        (home / ".cargo").mkdir()
        (home / ".cargo/config.toml").write_text(
            '[source.crates-io]\nreplace-with = "here"\n[source.here]\nregistry = "sparse+https://crates.example/index/"\n')
    if name.startswith("chromium"):
        store = home / ".pki/nssdb"
        store.mkdir(parents=True)
        ours = env["NODE_EXTRA_CA_CERTS"]
        for words in (["-N", "--empty-password"], ["-A", "-n", "ours", "-t", "C,,", "-i", ours]):
            subprocess.run(["certutil", "-d", f"sql:{store}", *words], check=True, capture_output=True, timeout=TIMEOUT)
        env["BROWSER"] = (f"--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=4000 "
                          f"--user-data-dir={home}/profile --proxy-server={env['HTTPS_PROXY']}")
