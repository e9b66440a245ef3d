"""A memory service for the tests: the real Astrocyte engine, in memory and without a model, behind a small HTTP
server with the gateway's documented routes and three of its ways to know a caller.

Like the gateway it believes whatever principal it is told: whom to believe is the business of whoever sits in front.
Only as `jwt_oidc` does it look for a signature, by the key set in `jwks.json` beside the file it writes to.
Every request that arrives is written down, one JSON line each; that is what the tests judge by.

Arguments: the mode (`api_key`, `dev` or `jwt_oidc`), the certificate, its key, and the file to write to.
"""

import asyncio
import base64
import dataclasses
import hashlib
import json
import os
import re
import ssl
import sys
import threading
import time
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from astrocyte import AccessDenied, AccessGrant, Astrocyte, AstrocyteContext
from astrocyte.testing.in_memory import InMemoryEngineProvider

MODE, CERTIFICATE, KEY, SEEN = sys.argv[1:5]
API_KEY = "the-shared-key-of-the-service"

# Each team's principal has its own bank and the shared one, in its own environment.
BANKS = {
    "agent:sandbox-a": ["staging:team-a", "staging:shared"],
    "agent:sandbox-b": ["staging:team-b", "staging:shared"],
    "agent:sandbox-c": ["production:team-a", "production:shared"],
    "agent:sandbox-d": ["staging:team-d"],
}

# Whom a token names, as the gateway reads it: its type and its subject.
SPIFFE = "spiffe://acme.example/tenant/acme/env/staging/sandbox/"
BANKS |= {who.replace(":", f":{SPIFFE}"): banks for who, banks in BANKS.items() if "-c" not in who}
AUDIENCE = "spiffe://acme.example/memory"
ISSUER = "https://sandbar.acme.example"

engine = Astrocyte.from_config_dict({"access_control": {"enabled": True, "default_policy": "deny"}})
engine.set_engine_provider(InMemoryEngineProvider())
engine.set_access_grants(
    [AccessGrant(bank, who, ["read", "write", "forget"]) for who, banks in BANKS.items() for bank in banks]
)

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
written = threading.Lock()


class Unknown(Exception):
    pass


def decoded(part):
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def verified(bearer):
    """The claims of an RS256 token (RFC 7515, RFC 8017 section 8.2.2), by nothing but the published keys."""
    try:
        scheme, token = bearer.split(" ")
        head, claims, signature = token.split(".")
        with open(os.path.join(os.path.dirname(SEEN), "jwks.json"), encoding="utf-8") as file:
            keys = {key["kid"]: key for key in json.load(file)["keys"]}
        said = json.loads(decoded(head))
        key = keys[said["kid"]]
        if scheme != "Bearer" or said["alg"] != "RS256" or key["kty"] != "RSA":
            raise Unknown("another algorithm")
        modulus, exponent = (int.from_bytes(decoded(key[part]), "big") for part in "ne")
        size = (modulus.bit_length() + 7) // 8
        digest = bytes.fromhex("3031300d060960864801650304020105000420")
        digest += hashlib.sha256(f"{head}.{claims}".encode()).digest()
        meant = b"\0\1" + b"\xff" * (size - len(digest) - 3) + b"\0" + digest
        if pow(int.from_bytes(decoded(signature), "big"), exponent, modulus).to_bytes(size, "big") != meant:
            raise Unknown("the signature is not of that key")
        claims = json.loads(decoded(claims))
        if (claims["aud"], claims["iss"]) != (AUDIENCE, ISSUER) or not claims["nbf"] <= time.time() < claims["exp"]:
            raise Unknown("not for here, or not for now")
        return claims
    except (KeyError, OSError, ValueError) as error:
        raise Unknown(f"{type(error).__name__}: {error}") from error


def plain(value):
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value


async def retain(body, context):
    return await engine.retain(
        body["content"], body["bank_id"], metadata=body.get("metadata"), tags=body.get("tags"), context=context
    )


async def recall(body, context):
    return await engine.recall(
        body["query"],
        body.get("bank_id"),
        banks=body.get("banks"),
        max_results=body.get("max_results", 10),
        context=context,
    )


async def reflect(body, context):
    return await engine.reflect(body["query"], body["bank_id"], context=context)


async def history(body, context):
    moment = datetime.now(timezone.utc)
    return await engine.history(body["query"], body["bank_id"], moment, context=context)


async def forget(body, context):
    return await engine.forget(
        body["bank_id"],
        memory_ids=body.get("memory_ids"),
        tags=body.get("tags"),
        scope=body.get("scope"),
        context=context,
    )


async def banks(body, context):
    return {"banks": sorted({bank for all in BANKS.values() for bank in all})}


async def nothing(body, context):
    """What needs a model or a store that is not here: known, allowed, and empty."""
    return {"items": [], "bank_id": body.get("bank_id")}


async def strange(body, context):
    """A service with a fault: it answers with content of a bank that nobody asked for."""
    kind = body["query"].removeprefix("strange:")
    if kind == "slow":
        await asyncio.sleep(20)
    hit = {"text": "of another bank", "bank_id": "staging:team-a", "score": 1.0}
    return {
        "foreign": {"hits": [hit]},
        "nameless": {"hits": [{"text": "of which bank?", "score": 1.0}]},
        "key": {"hits": [], "note": API_KEY},
        "named": {"hits": [], "_fields": [(f"X-You-Sent-{API_KEY.upper()}", "1")]},
        "forged": {"hits": [], "_fields": [("Sandbar-Reason", "not_listed"), ("sandbar_record", "1"), ("X-Kept", "1")]},
        "slow": {"hits": []},
        "token": {"hits": [], "note": body.get("_bearer")},
        "hitless": {"results": ["of which bank?"]},
        "huge": {"hits": [], "note": "x" * 400_000},
    }[kind]


ROUTES = [
    ("POST", "/v1/retain", retain),
    ("POST", "/v1/recall", recall),
    ("POST", "/v1/debug/recall", recall),
    ("POST", "/v1/reflect", reflect),
    ("POST", "/v1/history", history),
    ("POST", "/v1/audit", nothing),
    ("POST", "/v1/graph/search", nothing),
    ("POST", "/v1/graph/neighbors", nothing),
    ("POST", "/v1/forget", forget),
    ("POST", "/v1/observations/invalidate", nothing),
    ("POST", "/v1/compile", nothing),
    ("POST", "/v1/mental-models", nothing),
    ("GET", "/v1/mental-models", nothing),
    ("GET", "/v1/mental-models/[^/]+", nothing),
    ("POST", "/v1/mental-models/[^/]+/refresh", nothing),
    ("DELETE", "/v1/mental-models/[^/]+", nothing),
    ("POST", "/v1/dsar/forget_principal", nothing),
    ("POST", "/v1/(export|import)", nothing),
    ("POST", "/v1/ingest/webhook/[^/]+", nothing),
    ("GET", "/v1/admin/banks", banks),
    ("(GET|POST|DELETE)", "/v1/admin/.*", nothing),
    ("GET", "/live|/health|/health/live|/health/ingest|/openapi.json|/docs", nothing),
]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    extra = ()

    def log_message(self, *_):
        pass

    def answer(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        self.write_down(body)
        target = urlsplit(self.path)
        route = next((do for method, path, do in ROUTES if self.fits(method, path, target.path)), None)
        if MODE == "api_key" and not target.path.startswith(("/live", "/health")):
            if self.headers.get("X-Api-Key") != API_KEY:
                return self.say(401, {"detail": "invalid api key"})
        principal = self.headers.get("X-Astrocyte-Principal") or "anonymous"
        if MODE == "jwt_oidc":
            try:
                claims = verified(self.headers.get("Authorization") or "")
                principal = f"{claims.get('astrocyte_actor_type', 'user')}:{claims['sub']}"
            except Unknown as error:
                return self.say(401, {"detail": str(error)})
        if route is None:
            return self.say(404, {"detail": "Not Found"})
        try:
            asked = json.loads(body) if body else {key: all[-1] for key, all in parse_qs(target.query).items()}
            if str(asked.get("query", "")).startswith("strange:"):
                route = strange
            context = AstrocyteContext(principal=principal)
            asked["_bearer"] = self.headers.get("Authorization")
            result = asyncio.run_coroutine_threadsafe(route(asked, context), loop).result(30)
            self.extra = result.pop("_fields", []) if isinstance(result, dict) else []
            self.say(200, plain(result))
        except AccessDenied as error:
            self.say(403, {"detail": str(error)})
        except Exception as error:  # as a gateway would: its caller's fault
            self.say(400, {"detail": f"{type(error).__name__}: {error}"})

    do_GET = do_POST = do_DELETE = do_PUT = do_HEAD = do_OPTIONS = do_PATCH = answer

    def fits(self, method, path, target):
        return re.fullmatch(method, self.command) and re.fullmatch(path, target)

    def write_down(self, body):
        seen = {
            "method": self.command,
            "target": self.path,
            "headers": [[name.lower(), value] for name, value in self.headers.items()],
            "body": body.decode("utf-8", "backslashreplace"),
        }
        with written, open(SEEN, "a", encoding="utf-8") as file:
            file.write(json.dumps(seen) + "\n")

    def say(self, status, value):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        for name, value in self.extra:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, address):
        pass  # a caller that went away

    def get_request(self):
        socket, address = super().get_request()
        return tls.wrap_socket(socket, server_side=True, do_handshake_on_connect=False), address


tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(CERTIFICATE, KEY)
server = Server(("127.0.0.1", 0), Handler)
print(f"listening on {server.server_address[1]}", flush=True)
server.serve_forever()
