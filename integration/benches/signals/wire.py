"""A client that writes requests byte by byte: one connection through the proxy, kept alive."""

import socket
import ssl
import time

TIMEOUT = 20
# Between the pieces of a body: long enough for each to be read alone.
PAUSE = 0.005


class Wire:
    """A TLS connection to `host` through the proxy at `port`. Trusts whoever answers: it checks nothing but what left."""

    def __init__(self, port, host):
        self.port, self.host, self.file = port, host, None

    def open(self):
        raw = socket.create_connection(("127.0.0.1", self.port), TIMEOUT)
        raw.sendall(f"CONNECT {self.host}:443 HTTP/1.1\r\nHost: {self.host}:443\r\n\r\n".encode())
        granted = b""
        while b"\r\n\r\n" not in granted:
            more = raw.recv(4096)
            if not more:
                raise ConnectionError(f"CONNECT was not answered: {granted[:200]!r}")
            granted += more
        if not granted.startswith(b"HTTP/1.1 200"):
            raise ConnectionError(f"CONNECT was refused: {granted[:200]!r}")
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self.socket = context.wrap_socket(raw, server_hostname=self.host)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb")

    def close(self):
        if self.file:
            self.file.close()
            self.socket.close()
            self.file = None

    def send(self, method="GET", path="/", fields=(), body=b"", raw=None):
        """Sends a request and returns the status of its answer; 0 for a connection that ends without one.

        `fields` are pairs, written as they are. `raw` is the body with its framing, which the fields must announce; a
        list of pieces is sent with a pause after each.
        """
        head = [f"{method} {path} HTTP/1.1", f"Host: {self.host}"]
        head += [f"{name}: {value}" for name, value in fields]
        if raw is None and (body or method in ("POST", "PUT", "PATCH")):
            head.append(f"Content-Length: {len(body)}")
        message = "\r\n".join(head).encode("latin-1") + b"\r\n\r\n"
        parts = raw if isinstance(raw, list) else [body if raw is None else raw]
        if self.file is None:
            self.open()
        try:
            self.socket.sendall(message + parts[0])
            for part in parts[1:]:
                time.sleep(PAUSE)
                self.socket.sendall(part)
            return self.answer(method)
        except (ConnectionError, ssl.SSLError):
            self.close()
            return 0

    def answer(self, method):
        line = self.file.readline()
        if not line:
            self.close()
            return 0
        status, length, chunked, close = int(line.split()[1]), 0, False, False
        while (line := self.file.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            name, value = name.lower(), value.strip().lower()
            length = int(value) if name == "content-length" else length
            chunked |= name == "transfer-encoding" and value == "chunked"
            close |= name == "connection" and value == "close"
        if method != "HEAD" and status not in (204, 304):
            if chunked:
                while size := int(self.file.readline().split(b";")[0], 16):
                    self.file.read(size + 2)
                self.file.readline()
            else:
                self.file.read(length)
        if close:
            self.close()
        return status
