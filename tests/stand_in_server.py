"""A small inference server in place of vLLM: an address, a key, answers; how it behaves is in its environment.

    STAND_IN=late:0.3     healthy only after so many seconds
    STAND_IN=dies:TEXT    prints TEXT and ends with exit code 3
    STAND_IN=hangs        never listens
    STAND_IN=deaf         ignores SIGTERM
    STAND_IN=loses:0.3    its health is lost after so many seconds of listening

Invariant: the standard library alone, since it is started in jobs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def main() -> None:
    """Listen where --host and --port say."""
    kind, _, value = os.environ.get("STAND_IN", "").partition(":")
    options = dict(zip(sys.argv, sys.argv[1:], strict=False))
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind == "dies":
        print(value, file=sys.stderr, flush=True)
        sys.exit(3)
    while kind == "hangs":
        time.sleep(1)
    began, key = time.monotonic(), os.environ.get("VLLM_API_KEY", "")

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *words: object) -> None:
            """It is quiet."""

        def answer(self, code: int, text: str = "") -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            after = time.monotonic() - began
            is_well = not (kind == "late" and after < float(value)) and not (kind == "loses" and after > float(value))
            self.answer(200 if is_well else 503)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if key and self.headers.get("Authorization") != f"Bearer {key}":
                self.answer(401)
            else:
                self.answer(200, json.dumps({"model": asked["model"], "words": sys.argv[1:]}))

    print(f"the key is {key}", flush=True)  # servers have printed theirs
    ThreadingHTTPServer((options["--host"], int(options["--port"])), Answers).serve_forever()


if __name__ == "__main__":
    main()
