"""The held-back part of the benign corpus, as far as it needs a library: written after the detectors were tuned on the
items of `tools`. `held_tools.py NAME` runs one function, as `tools.py` does.
"""

import base64
import hashlib
import http.cookiejar
import json
import os
import socket
import ssl
import sys
import time
import urllib.parse
import urllib.request
import uuid

import samples

DATA = samples.Samples("held-back tools")
PROXY = os.environ["HTTPS_PROXY"]
BUNDLE = os.environ["SSL_CERT_FILE"]
HEX = "0123456789abcdef"


def token(claims=6):
    part = lambda value: base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()
    body = {"iss": "https://login.example", "aud": "api", "iat": 1700000000, "exp": 1900000000,
            **{f"claim-{at}": DATA.pick(24) for at in range(claims)}}
    return f"{part({'alg': 'RS256', 'typ': 'JWT', 'kid': DATA.pick(16)})}.{part(body)}.{DATA.pick(342)}"


def cookiejar_login():
    """A form with a token against forgery, then pages; the session changes now and then."""
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    for user in ("ann", "bob"):
        page = opener.open("https://login.example/login", timeout=20).read().decode()
        mark = page.split('name="csrf" value="')[1].split('"')[0]
        form = urllib.parse.urlencode({"user": user, "password": DATA.pick(16), "csrf": mark}).encode()
        opener.open("https://login.example/login", form, timeout=20).read()
        for at in range(40):
            opener.open(f"https://login.example/account/orders?page={at}", timeout=20).read()


def oauth_pkce():
    import requests
    session = requests.Session()
    for _ in range(3):
        verifier = DATA.pick(64)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        session.get("https://login.example/authorize", timeout=20, params={
            "response_type": "code", "client_id": "app-7", "redirect_uri": "http://127.0.0.1:8400/callback",
            "scope": "openid profile", "state": DATA.pick(32), "nonce": DATA.pick(32), "code_challenge": challenge,
            "code_challenge_method": "S256"})
        answer = session.post("https://login.example/token", timeout=20, data={
            "grant_type": "authorization_code", "code": DATA.pick(40), "code_verifier": verifier}).json()
        for at in range(15):
            session.get(f"https://login.example/api/me/files/{at}", timeout=20,
                        headers={"Authorization": "Bearer " + answer["access_token"]})


def jsonrpc_polling():
    import requests
    session = requests.Session()
    for at in range(150):
        method = ["eth_blockNumber", "eth_getBlockByNumber", "eth_getLogs"][at % 3]
        session.post("https://rpc.example/v3/" + "4f6e" * 8, timeout=20,
                     json={"jsonrpc": "2.0", "id": at, "method": method, "params": [hex(17_000_000 + at), False]})


def mcp_session():
    import requests
    session = requests.Session()
    head = {"Accept": "application/json, text/event-stream", "Authorization": "Bearer " + token()}
    for _ in range(3):
        began = session.post("https://rpc.example/mcp", headers=head, timeout=20, json={
            "jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-03-26"}})
        head["Mcp-Session-Id"] = began.headers["Mcp-Session-Id"]
        for at in range(1, 25):
            session.post("https://rpc.example/mcp", headers=head, timeout=20, json={
                "jsonrpc": "2.0", "id": at, "method": "tools/call", "params": {"name": "search", "arguments": {
                    "q": DATA.prose(60)}}})
        session.delete("https://rpc.example/mcp", headers=head, timeout=20)


def tus_upload():
    import requests
    session = requests.Session()
    for at in range(4):
        data = DATA.bytes(400_000)
        name = base64.b64encode(f"recording-{at}.mp4".encode()).decode()
        made = session.post("https://tus.example/files/", timeout=20, headers={
            "Tus-Resumable": "1.0.0", "Upload-Length": str(len(data)),
            "Upload-Metadata": f"filename {name},filetype dmlkZW8vbXA0"})
        for offset in range(0, len(data), 65_536):
            session.patch(made.headers["Location"], data=data[offset : offset + 65_536], timeout=20, headers={
                "Tus-Resumable": "1.0.0", "Upload-Offset": str(offset),
                "Content-Type": "application/offset+octet-stream"})
        session.head(made.headers["Location"], headers={"Tus-Resumable": "1.0.0"}, timeout=20)


def gcs_resumable():
    import requests
    session = requests.Session()
    head = {"Authorization": "Bearer ya29." + DATA.pick(200)}
    for at in range(3):
        began = session.post("https://tus.example/upload/storage/v1/b/media/o", params={
            "uploadType": "resumable", "name": f"video-{at}.mp4"}, headers=head, json={"contentType": "video/mp4"}, timeout=20)
        for part in range(4):
            first = part * 262_144
            session.put(began.headers["Location"], data=DATA.bytes(262_144), timeout=20, headers={
                **head, "Content-Range": f"bytes {first}-{first + 262_143}/1048576"})


def server_sent_events():
    import requests
    session, last = requests.Session(), None
    for _ in range(12):
        head = {"Accept": "text/event-stream", "Cache-Control": "no-cache", **({"Last-Event-ID": last} if last else {})}
        answer = session.get("https://live.example/events/build-77", headers=head, timeout=20, stream=True)
        for line in answer.iter_lines():
            if line.startswith(b"id: "):
                last = line[4:].decode()


def long_polling():
    import requests
    session, cursor = requests.Session(), "0"
    for _ in range(80):
        answer = session.get("https://live.example/poll", params={"since": cursor, "timeout": 1}, timeout=20).json()
        cursor = answer["cursor"]


def websocket_handshakes():
    host, port = PROXY.removeprefix("http://").split(":")
    context = ssl.create_default_context(cafile=BUNDLE)
    for at in range(12):
        raw = socket.create_connection((host, int(port)), 20)
        raw.sendall(b"CONNECT live.example:443 HTTP/1.1\r\nHost: live.example:443\r\n\r\n")
        assert b" 200 " in raw.recv(4096)
        wire = context.wrap_socket(raw, server_hostname="live.example")
        key = base64.b64encode(DATA.bytes(16)).decode()
        wire.sendall((f"GET /socket?room=build-{at % 3} HTTP/1.1\r\nHost: live.example\r\nUpgrade: websocket\r\n"
                      f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n"
                      "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits\r\n\r\n").encode())
        assert b" 101 " in wire.recv(4096)
        wire.close()


def etag_revalidation():
    import requests
    session, known = requests.Session(), {}
    for at in range(200):
        name = samples.WORDS[at % 25]
        answer = session.get(f"https://feeds.example/feed/{name}.xml", timeout=20, headers=known.get(name, {}))
        if answer.status_code == 200:
            known[name] = {"If-None-Match": answer.headers["ETag"], "If-Modified-Since": answer.headers["Last-Modified"]}


def cursor_pagination():
    import requests
    session, cursor = requests.Session(), ""
    for _ in range(90):
        answer = session.get("https://feeds.example/v2/messages", params={"limit": 20, **({"cursor": cursor} if cursor else {})},
                             headers={"Authorization": "Bearer xoxp-" + "7" * 40}, timeout=20).json()
        cursor = answer["next"]


def github_api():
    import requests
    session = requests.Session()
    session.headers.update({"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28",
                            "Authorization": "Bearer " + DATA.crc_token("ghp_")})
    for at in range(40):
        commits = session.get("https://code.example/repos/acme/app/commits", params={"per_page": 10, "page": at + 1}, timeout=20)
        for commit in commits.json()[:3]:
            session.get(f"https://code.example/repos/acme/app/commits/{commit['sha']}", timeout=20)
            session.get(f"https://code.example/repos/acme/app/git/trees/{commit['tree']}", params={"recursive": 1}, timeout=20)


def search_cluster():
    import requests
    session = requests.Session()
    for at in range(40):
        session.post("https://code.example/logs-2024.05/_search", timeout=20, json={
            "query": {"match": {"message": DATA.prose(30)}}, "size": 20, "search_after": [1_700_000_000_000 + at]})
        lines = "".join(json.dumps({"index": {}}) + "\n" + json.dumps({"message": DATA.prose(90)}) + "\n" for _ in range(20))
        session.post("https://code.example/logs-2024.05/_bulk", data=lines, timeout=20,
                     headers={"Content-Type": "application/x-ndjson"})


def cluster_watch():
    import requests
    session = requests.Session()
    session.headers["Authorization"] = "Bearer " + token(20)
    for at in range(60):
        session.get("https://code.example/api/v1/namespaces/prod/pods", timeout=20, params={
            "watch": 1, "resourceVersion": 88_000 + at * 17, "timeoutSeconds": 300, "allowWatchBookmarks": "true"})
        session.patch(f"https://code.example/apis/apps/v1/namespaces/prod/deployments/web-{at % 5}", timeout=20,
                      headers={"Content-Type": "application/merge-patch+json"}, json={"spec": {"replicas": at % 9}})


def sentry_envelopes():
    import requests
    session = requests.Session()
    for at in range(40):
        event, trace, span = uuid.UUID(bytes=DATA.bytes(16)).hex, DATA.pick(32, HEX), DATA.pick(16, HEX)
        text = json.dumps({"event_id": event}) + "\n" + json.dumps({"type": "event"}) + "\n" + json.dumps(
            {"message": DATA.prose(200), "level": "error"}) + "\n"
        session.post("https://otel.example/api/42/envelope/", data=text, timeout=20, headers={
            "Content-Type": "application/x-sentry-envelope", "User-Agent": "sentry.python/2.1.1",
            "X-Sentry-Auth": f"Sentry sentry_key={'ab12' * 8}, sentry_version=7, sentry_client=sentry.python/2.1.1",
            "sentry-trace": f"{trace}-{span}-1",
            "baggage": f"sentry-trace_id={trace},sentry-environment=prod,sentry-release=app%401.2,sentry-sample_rate=1.0"})


def otel_logs():
    import requests
    session = requests.Session()
    for at in range(60):
        record = {"timeUnixNano": str(1_700_000_000_000_000_000 + at), "body": {"stringValue": DATA.prose(100)},
                  "traceId": DATA.pick(32, HEX), "spanId": DATA.pick(16, HEX)}
        session.post("https://otel.example/v1/logs", timeout=20, headers={"api-key": "eu01xx" + "5d" * 15},
                     json={"resourceLogs": [{"scopeLogs": [{"logRecords": [record] * 5}]}]})


def metrics_push():
    import requests
    session = requests.Session()
    for at in range(120):
        session.post("https://otel.example/api/v2/write", params={"org": "acme", "bucket": "ci", "precision": "ns"},
                     data=f"cpu,host=worker-7 load={DATA.random.random()} {1_700_000_000_000_000_000 + at}\n", timeout=20,
                     headers={"Authorization": "Token " + "q8" * 40})


def aws_client(service):
    import boto3
    from botocore.config import Config
    pair = [line.split(" = ")[1] for line in DATA.secret("aws").split("\n")]
    return boto3.client(service, endpoint_url="https://s3.example" if service == "s3" else f"https://{service}.aws.example",
                        region_name="eu-central-1", aws_access_key_id=pair[0], aws_secret_access_key=pair[1],
                        aws_session_token=DATA.pick(900), verify=BUNDLE,
                        config=Config(s3={"addressing_style": "path"}, proxies={"https": PROXY},
                                      retries={"max_attempts": 1}, connect_timeout=10, read_timeout=20))


def s3_parts_and_presigned_puts():
    import requests
    client, session = aws_client("s3"), requests.Session()
    upload = client.create_multipart_upload(Bucket="backups", Key="disk.img")["UploadId"]
    for part in range(1, 5):
        data = DATA.bytes(5 << 20)
        client.upload_part(Bucket="backups", Key="disk.img", UploadId=upload, PartNumber=part, Body=data,
                           ContentMD5=base64.b64encode(hashlib.md5(data).digest()).decode())
    for at in range(25):
        url = client.generate_presigned_url("put_object", {"Bucket": "media", "Key": f"in/clip-{at}.bin"})
        session.put(url, data=DATA.bytes(20_000), timeout=20)
    for at in range(25):
        client.head_object(Bucket="media", Key=f"in/clip-{at}.bin")
        client.get_object(Bucket="media", Key=f"in/clip-{at}.bin", Range="bytes=0-4095")["Body"].read()


def dynamo_items():
    client = aws_client("dynamodb")
    for at in range(80):
        client.put_item(TableName="runs", Item={"id": {"S": str(at)}, "state": {"S": DATA.prose(60)}})
        client.get_item(TableName="runs", Key={"id": {"S": str(at)}})


def queue_messages():
    client = aws_client("sqs")
    for at in range(60):
        client.send_message(QueueUrl="https://sqs.aws.example/123456789012/jobs", MessageBody=DATA.prose(200))
        client.receive_message(QueueUrl="https://sqs.aws.example/123456789012/jobs", WaitTimeSeconds=0)


def block_uploads():
    """An object store with signed query strings, in numbered blocks."""
    import requests
    session = requests.Session()
    query = {"sv": "2022-11-02", "se": "2030-01-01T00:00:00Z", "sr": "c", "sp": "rwl", "sig": base64.b64encode(DATA.bytes(32)).decode()}
    for at in range(3):
        ids = [base64.b64encode(f"{part:032}".encode()).decode() for part in range(8)]
        for block in ids:
            session.put(f"https://tus.example/blobs/data-{at}", params={"comp": "block", "blockid": block, **query},
                        data=DATA.bytes(40_000), timeout=20, headers={
                            "x-ms-version": "2022-11-02", "x-ms-client-request-id": str(uuid.UUID(bytes=DATA.bytes(16)))})
        session.put(f"https://tus.example/blobs/data-{at}", params={"comp": "blocklist", **query}, timeout=20,
                    data="".join(f"<Latest>{block}</Latest>" for block in ids))


def module_proxy():
    import requests
    session = requests.Session()
    session.headers["User-Agent"] = "Go-http-client/1.1"
    for at in range(40):
        module, version = f"code.example/!acme/{samples.WORDS[at]}", f"v0.{at}.0-20240{at % 9 + 1}01120000-{DATA.pick(12, HEX)}"
        for end in ("list", f"{version}.info", f"{version}.mod", f"{version}.zip"):
            session.get(f"https://feeds.example/{module}/@v/{end}", timeout=20)


def geocoding():
    """Addresses and coordinates of people's orders, in queries."""
    import httpx
    with httpx.Client(verify=BUNDLE) as client:
        for at in range(60):
            client.get("https://search.example/geocode", timeout=20, params={
                "q": f"{at} {DATA.prose(18).title()}, {DATA.pick(5, '0123456789')} {DATA.prose(6).title()}",
                "lat": round(DATA.random.uniform(-90, 90), 6), "lon": round(DATA.random.uniform(-180, 180), 6)})


if __name__ == "__main__":
    globals()[sys.argv[1]]()
