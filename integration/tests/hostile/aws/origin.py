"""Services of AWS, as far as the tests need them: each request is verified with botocore's own signer, from what
arrived. HTTP/1 and HTTP/2, over TLS.

Arguments: the certificate, its key, the file to write to, and the protocol (`http/1.1` or `h2`). The real keys are in
REAL_ID, REAL_SECRET and REAL_TOKEN. Prints its port. Writes a JSON line for each request that ended, and one for each
that did not.
"""

import base64
import datetime
import hashlib
import json
import os
import re
import socket
import ssl
import sys
import threading
import urllib.parse
import zlib

import h2.config
import h2.connection
import h2.events
from botocore.auth import S3SigV4Auth, SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

CERTIFICATE, KEY, SEEN, PROTOCOL = sys.argv[1:5]
KEYS = Credentials(os.environ["REAL_ID"], os.environ["REAL_SECRET"], os.environ.get("REAL_TOKEN"))
EMPTY = hashlib.sha256(b"").hexdigest()
STREAMING = "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"
written, objects, uploads = threading.Lock(), {}, {}


class Refused(Exception):
    """A request that AWS would refuse."""


def verifier(auth, names):
    """Botocore's signer, for the fields that the request says are signed."""

    class Verifier(auth):
        def headers_to_sign(self, request):
            headers = super().headers_to_sign(request)
            kept = type(headers)()
            for name in dict.fromkeys(headers.keys()):
                if name.lower() in names:
                    for value in headers.get_all(name):
                        kept[name.lower()] = value
            missing = set(names) - {name.lower() for name in kept.keys()}
            if missing:
                raise Refused(f"signed fields are missing: {sorted(missing)}")
            return kept

    return Verifier


def verify(method, target, fields, body):
    """Raises Refused, or returns the body without the coding of AWS."""
    named = {}
    for name, value in fields:
        named.setdefault(name.lower(), []).append(value)
    for name in ("authorization", "x-amz-date", "x-amz-content-sha256", "host", "content-length"):
        if len(named.get(name, [])) > 1:
            raise Refused(f"{name} occurs twice")
    one = {name: values[0] for name, values in named.items()}
    for word in ("x-amz-signature", "x-amz-credential", "x-amz-security-token", "awsaccesskeyid"):
        if word in urllib.parse.unquote(target).lower():
            raise Refused(f"{word} is in the query")
    match = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, "
        r"SignedHeaders=([a-z0-9;-]+), Signature=([0-9a-f]{64})",
        one.get("authorization", ""),
    )
    if not match:
        raise Refused("Authorization is malformed or missing")
    key, day, region, service, names, signature = match.groups()
    names = names.split(";")
    if key != KEYS.access_key:
        raise Refused("the key is not the real one")
    if one.get("x-amz-security-token") != KEYS.token:
        raise Refused("the session token is not the real one")
    stamp = one.get("x-amz-date", "")
    sent = datetime.datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.timezone.utc)
    if abs(datetime.datetime.now(datetime.timezone.utc) - sent) > datetime.timedelta(minutes=5):
        raise Refused("the time is skewed")
    if not stamp.startswith(day) or region != "eu-test-1" or service != one["host"].split(".")[0]:
        raise Refused("the scope is wrong")
    unsigned = [name for name in one if name.startswith("x-amz-") and name not in names]
    if unsigned or "host" not in names:
        raise Refused(f"not signed: {unsigned}")

    auth = verifier(S3SigV4Auth if service == "s3" else SigV4Auth, names)(KEYS, service, region)
    request = AWSRequest(method=method, url=f"https://{one['host']}{target}", data=body)
    for name, value in fields:
        if name.lower() != "host":
            request.headers.add_header(name, value)
    request.headers["Host"] = one["host"]
    request.context["timestamp"] = stamp
    declared = one.get("x-amz-content-sha256")
    if service == "s3" and not declared:
        raise Refused("x-amz-content-sha256 is missing")
    string = auth.string_to_sign(request, auth.canonical_request(request))
    if auth.signature(string, request) != signature:
        raise Refused("the signature is wrong")

    def sign_chunk(previous, kind, text):
        lines = [f"AWS4-HMAC-SHA256-{kind}", stamp, f"{day}/{region}/{service}/aws4_request", previous, *text]
        return auth.signature("\n".join(lines), request)

    if declared and declared.startswith("STREAMING-"):
        return unchunk(one, declared, body, signature, sign_chunk)
    if declared not in (None, "UNSIGNED-PAYLOAD") and hashlib.sha256(body).hexdigest() != declared:
        raise Refused("the digest is wrong")
    return body


def unchunk(one, declared, body, previous, sign_chunk):
    signed = declared.startswith(STREAMING)
    content, rest = bytearray(), body
    while True:
        line, found, rest = rest.partition(b"\r\n")
        pattern = r"([0-9a-f]+);chunk-signature=([0-9a-f]{64})" if signed else r"([0-9a-f]+)()"
        match = re.fullmatch(pattern, line.decode("ascii"))
        if not found or not match:
            raise Refused(f"a chunk is malformed: {line[:100]}")
        size = int(match[1], 16)
        chunk, rest = rest[:size], rest[size:]
        if signed:
            expected = sign_chunk(previous, "PAYLOAD", [EMPTY, hashlib.sha256(chunk).hexdigest()])
            if match[2] != expected:
                raise Refused("the signature of a chunk is wrong")
            previous = expected
        if size == 0:
            break
        if len(chunk) < size or rest[:2] != b"\r\n":
            raise Refused("a chunk is cut short")
        content += chunk
        rest = rest[2:]
    trailers, end = {}, False
    while not end:
        line, found, rest = rest.partition(b"\r\n")
        if not found:
            raise Refused("the end is missing")
        if line:
            name, _, value = line.decode("ascii").partition(":")
            trailers[name] = value
        end = not line
    if rest:
        raise Refused("bytes follow the end")
    wanted = [name.strip() for name in one.get("x-amz-trailer", "").split(",") if name.strip()]
    if declared == STREAMING + "-TRAILER":
        lines = "".join(f"{name}:{trailers[name]}\n" for name in sorted(wanted))
        expected = sign_chunk(previous, "TRAILER", [hashlib.sha256(lines.encode()).hexdigest()])
        if trailers.pop("x-amz-trailer-signature", None) != expected:
            raise Refused("the signature of the trailers is wrong")
    if sorted(trailers) != sorted(wanted):
        raise Refused(f"the trailers are {sorted(trailers)}")
    crc = base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()
    if trailers.get("x-amz-checksum-crc32", crc) != crc:
        raise Refused("the checksum is wrong")
    length = one.get("x-amz-decoded-content-length")
    if length is not None and int(length) != len(content):
        raise Refused("the decoded length is wrong")
    if (length is None) == ("content-length" in one):
        raise Refused("the length is missing, or too much is said of it")
    return bytes(content)


def write_down(**seen):
    with written, open(SEEN, "a", encoding="utf-8") as file:
        file.write(json.dumps(seen) + "\n")


def respond(method, target, fields, body):
    """Returns status, fields and body of the answer, and writes the request down."""
    seen = {"method": method, "target": target, "fields": fields, "length": len(body)}
    try:
        content = verify(method, target, fields, body)
    except Refused as refused:
        write_down(**seen, fault=str(refused))
        text = f"<Error><Code>SignatureDoesNotMatch</Code><Message>{refused}</Message></Error>"
        return 403, [("content-type", "application/xml")], text.encode()
    write_down(**seen, digest=hashlib.sha256(content).hexdigest())
    named = {name.lower(): value for name, value in fields}
    path, _, query = target.partition("?")
    query = urllib.parse.parse_qs(query, keep_blank_values=True)
    path = urllib.parse.unquote(path)
    match named["host"].split(".")[0]:
        case "s3":
            return object_store(method, path, query, named, content)
        case "dynamodb":
            return 200, [("content-type", "application/x-amz-json-1.0")], b'{"TableNames": ["verified"]}'
        case "sts":
            text = "<GetCallerIdentityResponse><GetCallerIdentityResult><Account>123456789012</Account>"
            text += "</GetCallerIdentityResult></GetCallerIdentityResponse>"
            return 200, [("content-type", "text/xml")], text.encode()
        case "sqs":
            text = json.loads(content)["MessageBody"]
            answer = {"MessageId": "1", "MD5OfMessageBody": hashlib.md5(text.encode()).hexdigest()}
            return 200, [("content-type", "application/x-amz-json-1.0")], json.dumps(answer).encode()
    return 404, [], b""


def object_store(method, path, query, named, content):
    xml = [("content-type", "application/xml")]
    etag = [("etag", f'"{hashlib.md5(content).hexdigest()}"')]
    if method == "POST" and "uploads" in query:
        text = "<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>"
        uploads[path] = {}
        return 200, xml, text.encode()
    if method == "PUT" and "partNumber" in query:
        uploads[path][int(query["partNumber"][0])] = content
        return 200, etag, b""
    if method == "POST" and "uploadId" in query:
        objects[path] = b"".join(part for _, part in sorted(uploads.pop(path).items()))
        return 200, xml, b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"
    if method == "PUT":
        objects[path] = content
        return 200, etag, b""
    if "list-type" in query:
        prefix = query.get("prefix", [""])[0]
        keys = [key for key in sorted(objects) if key.removeprefix(path + "/").startswith(prefix)]
        text = "".join(f"<Contents><Key>{urllib.parse.quote(key.removeprefix(path + '/'))}</Key></Contents>" for key in keys)
        return 200, xml, f"<ListBucketResult><EncodingType>url</EncodingType>{text}</ListBucketResult>".encode()
    if path not in objects:
        return 404, xml, b"<Error><Code>NoSuchKey</Code></Error>"
    body = objects[path]
    part = re.fullmatch(r"bytes=(\d+)-(\d+)", named.get("range", ""))
    if part:
        first, last = int(part[1]), int(part[2])
        return 206, [("content-range", f"bytes {first}-{last}/{len(body)}")], body[first : last + 1]
    return 200, [], body


def serve_http1(stream):
    file = stream.makefile("rb")
    while line := file.readline():
        method, target, _ = line.decode("latin-1").split()
        fields = []
        while (line := file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            fields.append([name, value.strip()])
        named = {name.lower(): value for name, value in fields}
        if named.get("expect", "").lower() == "100-continue":
            stream.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body, whole = bytearray(), True
        if named.get("transfer-encoding") == "chunked":
            while size := int((file.readline() or b"-1").split(b";")[0], 16):
                chunk = file.read(size) if size > 0 else b""
                body += chunk
                whole = len(chunk) == size and file.readline() == b"\r\n"
                if not whole:
                    break
            whole = whole and file.readline() == b"\r\n"
        else:
            length = int(named.get("content-length", "0"))
            body += file.read(length)
            whole = len(body) == length
        if not whole:
            write_down(method=method, target=target, fields=fields, length=len(body), fault="incomplete")
            return
        status, head, content = respond(method, target, fields, bytes(body))
        lines = [f"HTTP/1.1 {status} X", f"content-length: {len(content)}", *(f"{n}: {v}" for n, v in head)]
        shown = b"" if method == "HEAD" else content
        stream.sendall("\r\n".join([*lines, "", ""]).encode() + shown)


def serve_http2(stream):
    connection = h2.connection.H2Connection(config=h2.config.H2Configuration(client_side=False))
    connection.initiate_connection()
    stream.sendall(connection.data_to_send())
    requests, pending = {}, {}

    def flush():
        for number, rest in list(pending.items()):
            while rest and (room := min(connection.local_flow_control_window(number), 16384)) > 0:
                connection.send_data(number, rest[:room])
                rest = rest[room:]
            pending[number] = rest
            if not rest:
                connection.end_stream(number)
                del pending[number]

    try:
        while data := stream.recv(65536):
            for event in connection.receive_data(data):
                match event:
                    case h2.events.RequestReceived():
                        fields = [[name.decode(), value.decode()] for name, value in event.headers]
                        requests[event.stream_id] = (fields, bytearray())
                        if ["expect", "100-continue"] in fields:
                            connection.send_headers(event.stream_id, [(":status", "100")])
                    case h2.events.DataReceived():
                        requests[event.stream_id][1].extend(event.data)
                        connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    case h2.events.StreamEnded():
                        fields, body = requests.pop(event.stream_id)
                        pseudo = dict(fields[:4])
                        rest = [["host", pseudo[":authority"]], *(f for f in fields if not f[0].startswith(":"))]
                        status, head, content = respond(pseudo[":method"], pseudo[":path"], rest, bytes(body))
                        head = [(":status", str(status)), ("content-length", str(len(content))), *head]
                        connection.send_headers(event.stream_id, head)
                        pending[event.stream_id] = b"" if pseudo[":method"] == "HEAD" else content
            flush()
            stream.sendall(connection.data_to_send())
    finally:
        for fields, body in requests.values():
            pseudo = dict(fields[:4])
            write_down(method=pseudo[":method"], target=pseudo[":path"], fields=fields, length=len(body), fault="incomplete")


def guarded(stream):
    try:
        stream = tls.wrap_socket(stream, server_side=True)
        serve_http2(stream) if PROTOCOL == "h2" else serve_http1(stream)
    except (OSError, ssl.SSLError):
        pass  # the other side went away


tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(CERTIFICATE, KEY)
tls.set_alpn_protocols([PROTOCOL])
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
print(f"listening on {listener.getsockname()[1]}", flush=True)
while True:
    threading.Thread(target=guarded, args=(listener.accept()[0],), daemon=True).start()
