"""Answers as the APIs of two model vendors do, over TLS: vendor.py PORT CHAIN KEY LOG OPENAI_KEY ANTHROPIC_KEY

Every request is a line of LOG, as JSON. A request without the key of its vendor gets 401.
"""

import http.server
import json
import ssl
import sys

PORT, CHAIN, KEY, LOG, OPENAI_KEY, ANTHROPIC_KEY = sys.argv[1:]
WORDS = ["hello ", "from ", "the ", "origin"]


def message(model, **over):
    whole = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [{"type": "text", "text": "".join(WORDS)}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    }
    return {**whole, **over}


def message_events(model):
    yield "message_start", {"message": message(model, content=[], stop_reason=None)}
    yield "content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}
    for word in WORDS:
        yield "content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": word}}
    yield "content_block_stop", {"index": 0}
    yield "message_delta", {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": 1}}
    yield "message_stop", {}


def completion(model, kind="chat.completion", **choice):
    return {"id": "c1", "object": kind, "created": 1, "model": model, "choices": [{"index": 0, **choice}]}


def completion_events(model):
    for word in WORDS:
        yield completion(model, "chat.completion.chunk", delta={"content": word}, finish_reason=None)
    yield completion(model, "chat.completion.chunk", delta={}, finish_reason="stop")


class Vendor(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        host = self.headers.get("host", "")
        if host == "api.openai.com":
            known = self.headers.get_all("authorization") == ["Bearer " + OPENAI_KEY]
        else:
            known = self.headers.get_all("x-api-key") == [ANTHROPIC_KEY]
        request = {"host": host, "line": self.requestline, "known": known, "fields": self.headers.items()}
        request |= {"agent": self.headers.get("user-agent"), "body": body.decode()}
        with open(LOG, "a") as log:
            log.write(json.dumps(request) + "\n")
        asked = json.loads(body)
        model, streams = asked.get("model"), asked.get("stream")
        path = self.path.split("?")[0]
        if not known:
            self.answer(401, {"error": {"message": "no such key"}})
        elif path == "/v1/messages" and streams:
            self.stream(f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n" for name, data in message_events(model))
        elif path == "/v1/messages":
            self.answer(200, message(model))
        elif path == "/v1/chat/completions" and streams:
            events = [json.dumps(event) for event in completion_events(model)]
            self.stream(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        elif path == "/v1/chat/completions":
            said = {"role": "assistant", "content": "".join(WORDS)}
            self.answer(200, completion(model, message=said, finish_reason="stop"))
        else:
            self.answer(404, {"error": {"message": "no such path"}})

    def answer(self, status, value):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def stream(self, events):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in [*(event.encode() for event in events), b""]:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
            self.wfile.flush()

    def log_message(self, *_):
        pass


context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(CHAIN, KEY)
server = http.server.ThreadingHTTPServer(("0.0.0.0", int(PORT)), Vendor)
server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
server.serve_forever()
