"""Serves DIR/<host>/<path> over HTTP, as plain files: site.py ADDRESS DIR"""

import http.server
import os
import sys


class Site(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def translate_path(self, path):
        host = self.headers.get("Host", "").split(":")[0]
        return super().translate_path("/" + os.path.basename(host) + path)


os.chdir(sys.argv[2])
server = http.server.ThreadingHTTPServer((sys.argv[1], 80), Site)
print("serving", flush=True)
server.serve_forever()
