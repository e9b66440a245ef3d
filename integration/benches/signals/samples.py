"""Values that the corpora send: random bytes with a fixed seed, secrets with valid checksums, encodings."""

import base64
import gzip
import html
import json
import random
import string
import struct
import subprocess
import urllib.parse
import zlib

BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
WORDS = """able account after again amount animal answer apple autumn bridge butter cable candle castle center chance
circle class cloud coffee color corner cotton danger degree design detail doctor dollar double engine evening
family figure finger flower forest garden general glass ground harbor island jacket kitchen letter market meadow
minute morning mother number orange office paper people picture planet pocket record river school season second
shadow silver simple sister spring station stone street summer supper table thing ticket travel valley village
water weather window winter wonder yellow""".split()


class Samples:
    """Draws values from a generator that is the same in every run."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def bytes(self, count):
        return self.random.randbytes(count)

    def pick(self, count, alphabet=BASE62):
        return "".join(self.random.choice(alphabet) for _ in range(count))

    def prose(self, count):
        """Text of about `count` characters."""
        words = []
        while sum(map(len, words)) + len(words) < count:
            words.append(self.random.choice(WORDS))
        return " ".join(words)

    def crc_token(self, prefix):
        body = self.pick(30)
        value, checksum = zlib.crc32(body.encode()), ""
        for _ in range(6):
            value, digit = divmod(value, 62)
            checksum = BASE62[digit] + checksum
        return prefix + body + checksum

    def secret(self, kind):
        """A secret as it stands in a file of settings."""
        match kind:
            case "aws":
                # The 40 bits after the first are an account of twelve digits.
                account = self.random.randrange(10**11, 10**12)
                bits = (1 << 40 | account) << 9 | self.random.randrange(512)
                alphabet = string.ascii_uppercase + "234567"
                key = "".join(alphabet[bits >> shift & 31] for shift in range(45, -1, -5)) + self.pick(6, alphabet)
                return f"aws_access_key_id = AKIA{key}\naws_secret_access_key = {self.pick(38, BASE62 + '+/')}aZ"
            case "anthropic":
                return "ANTHROPIC_API_KEY=sk-ant-api03-" + self.pick(93, BASE62) + "AA"
            case "github":
                return "GITHUB_TOKEN=" + self.crc_token("ghp_")
            case "npm":
                return "//registry.example/:_authToken=" + self.crc_token("npm_")
            case "openai":
                return f"OPENAI_API_KEY=sk-proj-{self.pick(74)}T3BlbkFJ{self.pick(74)}"
            case "google":
                return "GOOGLE_API_KEY=AIza" + self.pick(33) + "aZ"
            case "slack":
                digits = string.digits
                return f"SLACK_TOKEN=xoxb-{self.pick(12, digits)}-{self.pick(13, digits)}-{self.pick(24)}"
            case "stripe":
                return "STRIPE_KEY=sk_live_" + self.pick(24)
            case "gitlab":
                return "GITLAB_TOKEN=glpat-" + self.pick(20)
            case "jwt":
                part = lambda value: base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()
                claims = {"iss": "https://login.example", "sub": self.pick(12), "exp": 1900000000}
                return f"SESSION={part({'alg': 'RS256', 'typ': 'JWT'})}.{part(claims)}.{self.pick(86)}"
            case "connection":
                return f"DATABASE_URL=postgres://service:{self.pick(20)}@db.internal:5432/accounts"
            case "pem":
                made = subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519"], capture_output=True, check=True)
                return made.stdout.decode()
            case "rsa":
                made = subprocess.run(["openssl", "genrsa", "-traditional", "2048"], capture_output=True, check=True)
                return made.stdout.decode()
        raise ValueError(kind)

    def settings(self, kind, size=1400):
        """A file of settings of about `size` bytes with one secret in its middle."""
        line = lambda: f"{self.pick(8, string.ascii_uppercase)}_DIR=/srv/{self.prose(20).replace(' ', '/')}"
        around = [line() for _ in range(max(2, size // 80))]
        around.insert(len(around) // 2, self.secret(kind))
        return "\n".join(around) + "\n"


SECRETS = ["anthropic", "aws", "connection", "github", "gitlab", "google", "jwt", "npm", "openai", "pem", "rsa",
           "slack", "stripe"]


def percent(data):
    return "".join(f"%{byte:02X}" for byte in data)


def deflate(data):
    return zlib.compress(data)


ENCODINGS = {
    "raw": lambda data: data,
    "base32": base64.b32encode,
    "base64": base64.b64encode,
    "base64url": lambda data: base64.urlsafe_b64encode(data).rstrip(b"="),
    "base64-lines": base64.encodebytes,
    "deflate": deflate,
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "hex": lambda data: data.hex().encode(),
    "hex-upper": lambda data: data.hex().upper().encode(),
    "html": lambda data: "".join(f"&#{byte};" for byte in data).encode(),
    "html-names": lambda data: html.escape(data.decode()).encode(),
    "json": lambda data: json.dumps({"text": data.decode()}).encode(),
    "json-escapes": lambda data: ('{"text":"' + "".join(f"\\u{byte:04x}" for byte in data) + '"}').encode(),
    "percent": lambda data: percent(data).encode(),
    "form": lambda data: b"text=" + urllib.parse.quote_plus(data).encode(),
}

# For what is not a body: characters that may stand in a URL, a cookie and a field.
TEXT_ENCODINGS = {
    "hex": lambda data: data.hex(),
    "base64": lambda data: base64.urlsafe_b64encode(data).decode().rstrip("="),
    "base32": lambda data: base64.b32encode(data).decode().rstrip("="),
    "percent": lambda data: urllib.parse.quote_from_bytes(data, safe=""),
}


def png(samples, width=64, height=64):
    """A picture that does not compress."""
    rows = b"".join(b"\0" + samples.bytes(width * 3) for _ in range(height))

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
