"""An origin that speaks HTTP/2 alone, writes down every request with how its fields were encoded and
every DATA frame as it comes, and sends back the
`Authorization` it was given, in the manner that the path asks for.

Arguments: the certificate, its key, and the file to write to.
"""

import base64
import json
import socket
import ssl
import sys
import threading
import urllib.parse

import h2.config
import h2.connection
import h2.events

CERTIFICATE, KEY, SEEN = sys.argv[1:4]
written = threading.Lock()


def write_down(headers, body):
    fields = [[name.decode(), value.decode(), bool(getattr(field, "indexable", True))]
              for field in headers for name, value in [field]]
    with written, open(SEEN, "a", encoding="utf-8") as file:
        file.write(json.dumps({"fields": fields, "body": body.decode("utf-8", "backslashreplace")}) + "\n")


def halves(text):
    return [text[: len(text) // 2], text[len(text) // 2 :]]


def answer(connection, stream, headers):
    said = {name.decode(): value.decode() for name, value in headers}
    secret = said.get("authorization", "nothing").removeprefix("Bearer ")
    head, pieces, trailers = [(":status", "200")], ["plain"], None
    match said[":path"]:
        case "/v1/echo":
            head += [("x-echo", secret), ("location", "https://a.test/?t=" + urllib.parse.quote(secret))]
            head += [("set-cookie", "t=" + secret), ("set-cookie", "u=v")]
            pieces = ["you sent ", *halves(secret), ", ", *halves(base64.b64encode(secret.encode()).decode()), " thanks"]
        case "/v1/hints":
            connection.send_headers(stream, [(":status", "103"), ("link", f"</{secret}>; rel=preload")])
        case "/v1/trailers":
            trailers = [("x-echo", secret), ("x-end", "yes")]
        case "/v1/named":
            name, forged = "x-" + secret.encode().hex(), [("sandbar-reason", "not_listed")]
            head += [(name, "1"), ("x-kept", "yes"), *forged]
            trailers = [(name, "1"), ("x-end", "yes"), ("set-cookie", "evil"), *forged]
        case "/v1/long-trailers":
            trailers = [("x-long", "y" * 8000)]
        case "/v1/ends-like-it":
            pieces, trailers = ["all of this is " + secret[:3]], [("x-end", "yes")]
        case "/v1/grpc":
            message = b"all of this is " + secret[:3].encode()
            head += [("content-type", "application/grpc")]
            pieces = [b"\0" + len(message).to_bytes(4, "big") + message]
            trailers = [("grpc-status", "0"), ("grpc-message", secret)]
        case "/v1/grpc-gzip":
            head += [("content-type", "application/grpc"), ("grpc-encoding", "gzip")]
    connection.send_headers(stream, head)
    for at, piece in enumerate(pieces):
        data = piece if isinstance(piece, bytes) else piece.encode()
        connection.send_data(stream, data, end_stream=trailers is None and at + 1 == len(pieces))
    if trailers is not None:
        connection.send_headers(stream, trailers, end_stream=True)


def serve(stream):
    stream = tls.wrap_socket(stream, server_side=True)
    config = h2.config.H2Configuration(client_side=False)
    connection = h2.connection.H2Connection(config=config)
    connection.initiate_connection()
    stream.sendall(connection.data_to_send())
    requests = {}
    while data := stream.recv(65536):
        for event in connection.receive_data(data):
            match event:
                case h2.events.RequestReceived():
                    requests[event.stream_id] = (event.headers, bytearray())
                case h2.events.DataReceived():
                    with written, open(SEEN + ".frames", "a", encoding="utf-8") as file:
                        file.write(json.dumps({"stream": event.stream_id, "length": len(event.data)}) + "\n")
                    requests[event.stream_id][1].extend(event.data)
                    connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                case h2.events.StreamEnded():
                    headers, body = requests.pop(event.stream_id)
                    write_down(headers, body)
                    answer(connection, event.stream_id, headers)
        stream.sendall(connection.data_to_send())


def guarded(stream):
    try:
        serve(stream)
    except (OSError, ssl.SSLError):
        pass  # the other side went away


tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain(CERTIFICATE, KEY)
tls.set_alpn_protocols(["h2"])
listener = socket.create_server(("127.0.0.1", 0), backlog=64)
print(f"listening on {listener.getsockname()[1]}", flush=True)
while True:
    threading.Thread(target=guarded, args=(listener.accept()[0],), daemon=True).start()
