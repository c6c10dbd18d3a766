"""Stands in for the gateway: serves on the inherited socket, says who it is and what it was told, ends on SIGTERM."""

import json
import os
import signal
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"pid": os.getpid(), "told": json.loads(os.environ["STUB_TOLD"])}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if "STUB_DIES" in os.environ:
    sys.exit(os.environ["STUB_DIES"])
signal.signal(signal.SIGTERM, signal.SIG_IGN if "STUB_DEAF" in os.environ else lambda *_: os._exit(0))
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
server.serve_forever()
