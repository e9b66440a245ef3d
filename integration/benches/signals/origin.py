"""Servers for both corpora, on loopback: package indexes, git, model APIs, object storage, telemetry, a web site, and
`*.drop.example`, which takes whatever it gets and keeps what arrived.

One TLS listener on port 443 speaks HTTP/1.1 and tells hosts apart by `Host`; gRPC has a listener of its own.
"""

import base64
import collections
import concurrent.futures
import hashlib
import http.server
import io
import json
import os
import re
import socketserver
import ssl
import subprocess
import tarfile
import threading
import time
import urllib.parse
import zipfile

import samples

HOSTS = ["analytics.example", "anthropic.example", "api.openai.com", "cdn.example", "code.example", "crates.example",
         "downloads.example", "dynamodb.aws.example", "feeds.example", "files.example", "github.com", "grpc.example",
         "index.example", "jobs.example", "live.example", "login.example", "npm.example", "otel.example",
         "registry.example", "rpc.example", "s3.example", "search.example", "sqs.aws.example", "tus.example", "web.example"]
GRPC_PORT = 8443


class Arrived:
    """A request as it arrived: fields in order and as they were spelt, sizes of chunks, trailers."""

    def __init__(self, method, path, fields, chunks, trailers, body):
        self.method, self.path, self.fields = method, path, fields
        self.chunks, self.trailers, self.body = chunks, trailers, body


class World:
    """What the servers serve, and what arrived at `*.drop.example` by host."""

    def __init__(self, directory):
        self.directory = directory
        self.samples = samples.Samples("origin")
        self.arrived = collections.defaultdict(list)
        self.requests = collections.Counter()
        self.lock = threading.Lock()
        self.jobs = collections.Counter()
        self.objects = {}
        self.picture = samples.png(self.samples)
        self.wheels = self.make_wheels()
        self.tarballs = self.make_tarballs()
        self.crates = self.make_crates()
        self.blobs = {}
        for _ in range(24):
            blob = self.samples.bytes(self.samples.random.randrange(2_000, 200_000))
            self.blobs[hashlib.sha256(blob).hexdigest()] = blob
        self.make_repository()

    def make_wheels(self):
        names = [f"{one}-{two}" for one, two in zip(samples.WORDS[:14], samples.WORDS[30:44])]
        wheels = {}
        for at, name in enumerate(names):
            module, file = name.replace("-", "_"), io.BytesIO()
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                needs = "".join(f"Requires-Dist: {need}>=1.0\n" for need in names[at + 1 : at + 3])
                needs += "Provides-Extra: more\n" + "".join(
                    f"Requires-Dist: {need}>=1.0; extra == 'more'\n" for need in names[at + 3 : at + 5])
                info = f"{module}-1.{at}.dist-info"
                archive.writestr(f"{module}/__init__.py", self.samples.prose(4_000))
                archive.writestr(f"{module}/data.bin", self.samples.bytes(20_000))
                archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.{at}\n{needs}")
                archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                archive.writestr(f"{info}/RECORD", "")
            wheels[name] = (f"{module}-1.{at}-py3-none-any.whl", file.getvalue())
        return wheels

    def tar(self, files):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            for path, content in files.items():
                entry = tarfile.TarInfo(path)
                entry.size, entry.mode = len(content), 0o644
                archive.addfile(entry, io.BytesIO(content))
        return file.getvalue()

    def make_tarballs(self):
        names = [samples.WORDS[at] + "-" + samples.WORDS[at + 20] for at in range(16)] + ["@acme/tools", "@acme/types"]
        made = {}
        for at, name in enumerate(names):
            needs = {need: "^1.0.0" for need in names[at + 1 : at + 3]}
            package = {"name": name, "version": f"1.{at}.0", "dependencies": needs, "main": "index.js"}
            made[name] = (package, self.tar({
                "package/package.json": json.dumps(package).encode(),
                "package/index.js": self.samples.prose(6_000).encode(),
                "package/data.bin": self.samples.bytes(9_000),
            }))
        return made

    def make_crates(self):
        names = [samples.WORDS[at] + "_" + samples.WORDS[at + 50] for at in range(12)]
        made = {}
        for at, name in enumerate(names):
            needs = names[at + 1 : at + 3]
            manifest = f'[package]\nname = "{name}"\nversion = "1.{at}.0"\nedition = "2021"\n[dependencies]\n'
            manifest += "".join(f'{need} = "1"\n' for need in needs)
            archive = self.tar({
                f"{name}-1.{at}.0/Cargo.toml": manifest.encode(),
                f"{name}-1.{at}.0/src/lib.rs": b"// " + self.samples.prose(3_000).encode(),
                f"{name}-1.{at}.0/data.bin": self.samples.bytes(9_000),
            })
            line = {"name": name, "vers": f"1.{at}.0", "features": {}, "yanked": False,
                    "cksum": hashlib.sha256(archive).hexdigest(),
                    "deps": [{"name": need, "req": "^1", "features": [], "optional": False, "default_features": True,
                              "target": None, "kind": "normal"} for need in needs]}
            made[name] = (json.dumps(line) + "\n", archive)
        return made

    def make_repository(self):
        work, bare = self.directory / "work", self.directory / "git/acme/app.git"
        work.mkdir(parents=True)
        for at in range(30):
            (work / f"file{at}.txt").write_text(self.samples.prose(3_000))
        (work / "data.bin").write_bytes(self.samples.bytes(100_000))
        identity = ["-c", "user.name=a", "-c", "user.email=a@web.example"]
        for command in (["init", "-q", "-b", "main"], ["add", "."], [*identity, "commit", "-qm", "first"],
                        ["clone", "-q", "--bare", ".", str(bare)]):
            subprocess.run(["git", *command], cwd=work, check=True, capture_output=True)
        subprocess.run(["git", "config", "http.receivepack", "true"], cwd=bare, check=True)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    disable_nagle_algorithm = True
    wbufsize = -1
    world = None

    def log_message(self, *_):
        pass

    def __getattr__(self, name):
        # Any method is taken: the choice of it is one of the channels that are measured.
        if name.startswith("do_"):
            return self.serve
        raise AttributeError(name)

    def serve(self):
        try:
            self.read_request()
            url = urllib.parse.urlsplit(self.path)
            self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            host = self.headers.get("host", "").split(":")[0]
            with self.world.lock:
                self.world.requests[host] += 1
            if host.endswith("drop.example"):
                kept = Arrived(self.command, self.path, self.headers.items(), self.chunks, self.trailers, self.body)
                self.world.arrived[host].append(kept)
                self.reply(b"ok\n")
            else:
                getattr(self, "host_" + host.split(".")[0] if host != "api.openai.com" else "host_openai")(url.path)
        except (ConnectionError, ssl.SSLError, TimeoutError, ValueError):
            self.close_connection = True  # the client is gone, or ended in the middle of a body

    def read_request(self):
        self.chunks, self.trailers = [], []
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            length = int(self.headers.get("content-length", 0))
            self.body = self.rfile.read(length)
            if len(self.body) < length:
                raise ConnectionError("the request ends early")
            return
        parts = []
        while size := int(self.rfile.readline().split(b";")[0] or b"x", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            self.chunks.append(size)
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            self.trailers.append(line.decode("latin-1"))
        self.body = b"".join(parts)

    def reply(self, body=b"", status=200, content_type="text/plain", **fields):
        if isinstance(body, (dict, list)):
            body, content_type = json.dumps(body).encode(), "application/json"
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        for name, value in fields.items():
            for each in value if isinstance(value, list) else [value]:
                self.send_header(name.replace("_", "-"), each)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reply_events(self, events):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for name, event in events:
            data = event if isinstance(event, str) else json.dumps(event)
            text = (f"event: {name}\n" if name else "") + f"data: {data}\n\n"
            self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())
        self.wfile.write(b"0\r\n\r\n")

    def host_index(self, path):
        name = path.removeprefix("/simple/").strip("/")
        if name not in self.world.wheels:
            return self.reply(b"not found", 404)
        file, content = self.world.wheels[name]
        digest = hashlib.sha256(content).hexdigest()
        place = hashlib.blake2b(content, digest_size=32).hexdigest()
        url = f"https://files.example/packages/{place[:2]}/{place[2:4]}/{place[4:]}/{file}#sha256={digest}"
        page = "<!DOCTYPE html><html><body>" + f'<a href="{url}" data-requires-python="&gt;=3.8">{file}</a><br>\n' + "</body></html>"
        self.reply(page.encode(), content_type="text/html", ETag=f'"{digest[:20]}"', Cache_Control="max-age=600")

    def host_files(self, path):
        for file, content in self.world.wheels.values():
            if path.endswith("/" + file):
                return self.reply(content, content_type="application/octet-stream")
        self.reply(b"not found", 404)

    def host_npm(self, path):
        path = urllib.parse.unquote(path)
        if path.startswith("/-/"):
            return self.reply({})
        name = path.strip("/").split("/-/")[0]
        if name not in self.world.tarballs:
            return self.reply({"error": "not found"}, 404)
        package, content = self.world.tarballs[name]
        if "/-/" in path:
            return self.reply(content, content_type="application/octet-stream")
        version = package["version"]
        file = f"{name.split('/')[-1]}-{version}.tgz"
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode()
        dist = {"tarball": f"https://npm.example/{name}/-/{file}", "integrity": integrity,
                "shasum": hashlib.sha1(content).hexdigest()}
        self.reply({"name": name, "dist-tags": {"latest": version}, "versions": {version: {**package, "dist": dist}},
                    "readme": "words " * 300})

    def host_github(self, path):
        env = {**os.environ, "GIT_PROJECT_ROOT": str(self.world.directory / "git"), "GIT_HTTP_EXPORT_ALL": "1",
               "PATH_INFO": path, "QUERY_STRING": urllib.parse.urlsplit(self.path).query, "REQUEST_METHOD": self.command,
               "CONTENT_TYPE": self.headers.get("content-type", ""), "REMOTE_USER": "a", "REMOTE_ADDR": "127.0.0.1",
               "HTTP_CONTENT_ENCODING": self.headers.get("content-encoding", ""), "CONTENT_LENGTH": str(len(self.body)),
               "GIT_PROTOCOL": self.headers.get("git-protocol", "")}
        if "git-receive-pack" in self.path and "authorization" not in self.headers:
            return self.reply(b"who are you?", 401, WWW_Authenticate='Basic realm="git"')
        run = subprocess.run(["git", "http-backend"], input=self.body, capture_output=True, env=env, timeout=30)
        head, _, body = run.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line)
        status = int(fields.pop("Status", "200 OK").split()[0])
        self.reply(body, status, fields.pop("Content-Type", "text/plain"))

    def host_crates(self, path):
        if path == "/index/config.json":
            return self.reply({"dl": "https://crates.example/api/v1/crates", "api": "https://crates.example"})
        if found := re.fullmatch(r"/api/v1/crates/([^/]+)/[^/]+/download", path):
            return self.reply(self.world.crates[found[1]][1], content_type="application/gzip")
        line = self.world.crates.get(path.split("/")[-1])
        self.reply(*([line[0].encode()] if line else [b"", 404]))

    def host_openai(self, path):
        text = self.world.samples.prose(600)
        asked = json.loads(self.body) if self.headers.get("content-type", "").startswith("application/json") else {}
        usage = {"prompt_tokens": 90, "completion_tokens": 110, "total_tokens": 200}
        base = {"id": "chatcmpl-" + self.world.samples.pick(24), "created": int(time.time()), "model": "gpt-4o"}
        if path == "/v1/embeddings":
            vector = [self.world.samples.random.uniform(-1, 1) for _ in range(256)]
            many = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
            data = [{"object": "embedding", "index": at, "embedding": vector} for at, _ in enumerate(many)]
            return self.reply({"object": "list", "data": data, "model": "e", "usage": usage})
        if path == "/v1/files":
            return self.reply({"id": "file-" + self.world.samples.pick(20), "object": "file", "bytes": len(self.body),
                               "created_at": 1, "filename": "a.jsonl", "purpose": "batch", "status": "processed"})
        if path == "/v1/responses":
            return self.reply({"id": "resp_" + self.world.samples.pick(40, "0123456789abcdef"), "object": "response",
                               "created_at": 1, "model": "gpt-4o", "status": "completed", "parallel_tool_calls": True,
                               "tool_choice": "auto", "tools": [], "output": [{
                                   "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
                                   "content": [{"type": "output_text", "text": text, "annotations": []}]}]})
        if asked.get("stream"):
            piece = lambda delta, reason=None: (None, {**base, "object": "chat.completion.chunk", "choices": [
                {"index": 0, "delta": delta, "finish_reason": reason}]})
            return self.reply_events([piece({"role": "assistant", "content": ""}),
                                      *(piece({"content": word + " "}) for word in text.split()),
                                      piece({}, "stop"), (None, "[DONE]")])
        message = {"role": "assistant", "content": text}
        if asked.get("tools") and asked["messages"][-1]["role"] == "user":
            call = {"id": "call_" + self.world.samples.pick(24), "type": "function",
                    "function": {"name": "read_file", "arguments": '{"path": "src/main.rs"}'}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        self.reply({**base, "object": "chat.completion", "usage": usage,
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def host_anthropic(self, path):
        text = self.world.samples.prose(600)
        asked = json.loads(self.body)
        usage = {"input_tokens": 90, "output_tokens": 110}
        if path.endswith("/count_tokens"):
            return self.reply({"input_tokens": 90})
        base = {"id": "msg_" + self.world.samples.pick(24), "type": "message", "role": "assistant",
                "model": "claude", "stop_reason": "end_turn", "stop_sequence": None, "usage": usage}
        if asked.get("stream"):
            start = {**base, "content": [], "stop_reason": None}
            delta = lambda word: {"type": "content_block_delta", "index": 0,
                                  "delta": {"type": "text_delta", "text": word + " "}}
            events = [{"type": "message_start", "message": start},
                      {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
                      *(delta(word) for word in text.split()), {"type": "content_block_stop", "index": 0},
                      {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
                      {"type": "message_stop"}]
            return self.reply_events([(event["type"], event) for event in events])
        content = [{"type": "text", "text": text}]
        if asked.get("tools"):
            content.append({"type": "tool_use", "id": "toolu_" + self.world.samples.pick(24), "name": "read_file",
                            "input": {"path": "src/main.rs"}})
        self.reply({**base, "content": content}, request_id="req_" + self.world.samples.pick(24))

    def host_s3(self, path):
        etag = '"' + hashlib.md5(self.body).hexdigest() + '"'
        fields = {"x_amz_request_id": self.world.samples.pick(16), "x_amz_id_2": self.world.samples.pick(76)}
        xml = lambda text: self.reply(text.encode(), content_type="application/xml", **fields)
        match self.command:
            case "PUT" if "partNumber" in self.query:
                self.reply(ETag=etag, **fields)
            case "PUT":
                self.world.objects[path] = self.body
                self.reply(ETag=etag, **fields)
            case "POST" if "uploads" in self.query:
                xml(f"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key><UploadId>"
                    f"{self.world.samples.pick(128)}</UploadId></InitiateMultipartUploadResult>")
            case "POST":
                xml("<CompleteMultipartUploadResult><Bucket>b</Bucket><Key>k</Key><ETag>&quot;a-2&quot;</ETag>"
                    "</CompleteMultipartUploadResult>")
            case "GET" if "list-type" in self.query:
                keys = "".join(f"<Contents><Key>{key.split('/', 2)[2]}</Key><Size>{len(body)}</Size><ETag>x</ETag>"
                               "<LastModified>2024-01-01T00:00:00.000Z</LastModified></Contents>"
                               for key, body in sorted(self.world.objects.items()))
                xml(f"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{keys}</ListBucketResult>")
            case "DELETE":
                self.reply(status=204, **fields)
            case _:
                content = self.world.objects.get(path)
                self.reply(content or b"", 200 if content is not None else 404, "application/octet-stream",
                           ETag=etag, Last_Modified="Mon, 01 Jan 2024 00:00:00 GMT", **fields)

    def host_otel(self, _path):
        self.reply(b"", content_type="application/x-protobuf")

    def host_web(self, path):
        cookies = [f"session={self.world.samples.pick(64)}; Path=/; Secure; HttpOnly",
                   f"csrf={self.world.samples.pick(32)}; Path=/"]
        if path.endswith(".png"):
            return self.reply(self.world.picture, content_type="image/png", Cache_Control="no-store")
        if path.endswith(".js"):
            return self.reply(SCRIPT, content_type="text/javascript", ETag='"5f3a-61b2c"')
        if path == "/api/items":
            page = int(self.query.get("page", 1))
            items = [{"id": page * 20 + at, "title": self.world.samples.prose(60)} for at in range(20)]
            return self.reply({"items": items, "next": page + 1})
        if path.startswith("/api/"):
            return self.reply({"ok": True, "id": self.world.samples.pick(12)})
        if path == "/oauth/token":
            return self.reply({"access_token": self.world.samples.pick(300), "token_type": "Bearer", "expires_in": 300})
        links = "".join(f"<a href=/page/{word}.html>{word}</a>" for word in samples.WORDS[:30])
        pictures = "".join(f"<img src=/img/{word}.png>" for word in samples.WORDS[40:46])
        page = (f"<html><head><script src=/static/app.js></script></head><body><p id=p>before</p>{links}{pictures}"
                f"<p>{self.world.samples.prose(2_000)}</p></body></html>")
        self.reply(page.encode(), content_type="text/html",
                   **({} if "cookie" in self.headers else {"Set_Cookie": cookies}))

    def host_login(self, path):
        session = f"sid={self.world.samples.pick(40)}; Path=/; HttpOnly; Secure"
        renew = {"Set_Cookie": session} if self.command == "POST" or self.query.get("page", "").endswith("9") else {}
        if path == "/token":
            part = lambda value: base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()
            claims = {"iss": "https://login.example", "sub": self.world.samples.pick(20), "exp": 1900000000,
                      "jti": self.world.samples.pick(22)}
            return self.reply({"access_token": f"{part({'alg': 'RS256', 'typ': 'JWT'})}.{part(claims)}."
                               f"{self.world.samples.pick(342)}", "refresh_token": self.world.samples.pick(64)})
        if path.startswith("/api/"):
            return self.reply({"file": path, "size": 12})
        form = f'<form><input name="csrf" value="{self.world.samples.pick(40)}"></form>' + self.world.samples.prose(400)
        self.reply(form.encode(), content_type="text/html", **(renew or ({} if "cookie" in self.headers else {"Set_Cookie": session})))

    def host_rpc(self, path):
        asked = json.loads(self.body or b"{}")
        session = {"Mcp_Session_Id": self.world.samples.pick(36)} if asked.get("method") == "initialize" else {}
        text = self.world.samples.prose(300) if path == "/mcp" else hex(17_000_000)
        self.reply({"jsonrpc": "2.0", "id": asked.get("id"), "result": text}, **session)

    def host_tus(self, path):
        match self.command:
            case "POST":
                place = self.world.samples.pick(32, "0123456789abcdef")
                query = f"?upload_id={self.world.samples.pick(80)}" if path.startswith("/upload/") else ""
                self.reply(b"", 201, Location=f"https://tus.example/files/{place}{query}", Tus_Resumable="1.0.0")
            case "PATCH":
                after = int(self.headers["upload-offset"]) + len(self.body)
                self.reply(b"", 204, Upload_Offset=str(after), Tus_Resumable="1.0.0")
            case _:
                self.reply(b"", 200, Upload_Offset="400000")

    def host_live(self, path):
        if path == "/poll":
            cursor = int(self.query.get("since", 0)) + self.world.samples.random.randrange(1, 4)
            return self.reply({"cursor": str(cursor), "events": []})
        if path == "/socket":
            accept = hashlib.sha1(self.headers["sec-websocket-key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11")
            self.close_connection = True
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(accept.digest()).decode())
            return self.end_headers()
        first = int(self.headers.get("last-event-id", 0))
        events = [f"id: {first + at}\ndata: {self.world.samples.prose(60)}\n\n" for at in range(1, 9)]
        self.reply("".join(events).encode(), content_type="text/event-stream")

    def host_feeds(self, path):
        if path == "/v2/messages":
            cursor = base64.b64encode(f"next_ts:{self.world.samples.pick(16, '0123456789')}".encode()).decode()
            return self.reply({"messages": [self.world.samples.prose(120) for _ in range(20)], "next": cursor})
        if "/@v/" in path:
            size = 30_000 if path.endswith(".zip") else 120
            return self.reply(b"x" * size)
        etag = '"' + hashlib.md5(path.encode()).hexdigest() + '"'
        fields = {"ETag": etag, "Last_Modified": "Mon, 06 May 2024 07:08:09 GMT"}
        if self.headers.get("if-none-match") == etag:
            return self.reply(b"", 304, **fields)
        self.reply(self.world.samples.prose(3_000).encode(), **fields)

    def host_code(self, path):
        digest = lambda: self.world.samples.pick(40, "0123456789abcdef")
        if path.endswith("/commits"):
            return self.reply([{"sha": digest(), "tree": digest(), "message": self.world.samples.prose(80)} for _ in range(10)])
        self.reply({"sha": digest(), "files": [{"name": self.world.samples.prose(30), "sha": digest()} for _ in range(12)]})

    def host_dynamodb(self, _path):
        self.reply({}, content_type="application/x-amz-json-1.0")

    def host_sqs(self, _path):
        digest = hashlib.md5(json.loads(self.body).get("MessageBody", "").encode()).hexdigest()
        answer = {"MessageId": "a", "MD5OfMessageBody": digest} if b"MessageBody" in self.body else {}
        self.reply(answer, content_type="application/x-amz-json-1.0")

    def host_cdn(self, path):
        self.reply(self.world.picture, content_type="image/png")

    def host_analytics(self, _path):
        if self.command == "GET":
            gif = b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff!\xf9\4\1\0\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;"
            return self.reply(gif, content_type="image/gif", Access_Control_Allow_Origin="*")
        self.reply(b"", 204, Access_Control_Allow_Origin="*")

    def host_jobs(self, path):
        if self.command == "POST":
            return self.reply({"job": self.world.samples.pick(24), "state": "queued"}, 202)
        with self.world.lock:
            self.world.jobs[path] += 1
        done = self.world.jobs[path] >= 30
        self.reply({"state": "done" if done else "running", "log": "line\n" * min(self.world.jobs[path], 20)})

    def host_downloads(self, path):
        if path.startswith("/latest/"):
            blob = sorted(self.world.blobs)[int(path.split("/")[-1]) % len(self.world.blobs)]
            signature = urllib.parse.urlencode({
                "X-Amz-Algorithm": "AWS4-HMAC-SHA256", "X-Amz-Date": time.strftime("%Y%m%dT%H%M%SZ"),
                "X-Amz-Credential": "ASIA2EXAMPLE/20240101/us-east-1/s3/aws4_request", "X-Amz-Expires": "300",
                "X-Amz-SignedHeaders": "host", "X-Amz-Security-Token": self.world.samples.pick(600),
                "X-Amz-Signature": self.world.samples.pick(64, "0123456789abcdef"),
                "response-content-disposition": "attachment; filename=app.tar.gz"})
            return self.reply(b"", 302, Location=f"https://downloads.example/blobs/{blob}?{signature}")
        self.reply(self.world.blobs.get(path.split("/")[-1], b"x" * 50_000), content_type="application/octet-stream")

    def host_registry(self, path):
        if path == "/token":
            return self.reply({"token": self.world.samples.pick(900), "expires_in": 300})
        if "/manifests/" in path:
            layers = [{"digest": "sha256:" + digest, "size": len(blob)} for digest, blob in self.world.blobs.items()]
            return self.reply({"schemaVersion": 2, "layers": layers})
        self.reply(self.world.blobs.get(path.split("sha256:")[-1], b""), content_type="application/octet-stream")

    def host_search(self, _path):
        hits = [{"title": self.world.samples.prose(60), "url": "https://web.example/" + self.world.samples.pick(8)}
                for _ in range(30)]
        self.reply({"query": self.query.get("q"), "hits": hits})


SCRIPT = b"""
document.getElementById('p').textContent = 'after';
const id = crypto.randomUUID();
document.cookie = '_ga=GA1.1.' + Math.floor(Math.random() * 2e9) + '.' + Math.floor(Date.now() / 1000) + '; path=/';
const beacon = (event, more) => navigator.sendBeacon('https://analytics.example/g/collect?v=2&tid=G-1A2B3C4D5E&cid='
  + id + '&en=' + event + '&dl=' + encodeURIComponent(location.href) + '&_s=' + more + '&sr=1920x1080&ul=en-us');
for (let at = 0; at < 12; at++) setTimeout(() => beacon('scroll', at), 40 * at);
new Image().src = 'https://analytics.example/pixel.gif?u=' + id + '&t=' + Date.now();
for (let at = 0; at < 6; at++)
  fetch('/api/event', {method: 'POST', body: JSON.stringify({id, at, text: 'x'.repeat(200)}),
    headers: {'Content-Type': 'application/json', 'X-CSRF-Token': document.cookie.match(/csrf=(\\w+)/)?.[1] ?? ''}});
fetch('https://cdn.example/assets/app.3f9c2b7e1d.chunk.png', {mode: 'no-cors'});
"""


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, world, certificate, key):
        super().__init__(("127.0.0.1", 443), type("BoundHandler", (Handler,), {"world": world}))
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(certificate, key)

    def get_request(self):
        connection, address = super().get_request()
        # The handshake is left to the thread of the connection.
        return self.context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request, client_address):
        pass


def start_grpc(certificate, key):
    import grpc

    def count(request, _context):
        for number in range(int(request)):
            yield str(number).encode() * 50

    def both(requests, _context):
        yield from requests

    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(lambda request, _context: request),
                "Count": grpc.unary_stream_rpc_method_handler(count), "Both": grpc.stream_stream_rpc_method_handler(both)}
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("acme.Counter", handlers),))
    credentials = grpc.ssl_server_credentials(((key.read_bytes(), certificate.read_bytes()),))
    server.add_secure_port(f"127.0.0.1:{GRPC_PORT}", credentials)
    server.start()
    return server
