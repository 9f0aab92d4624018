"""An instance under the real supervisor whose programs only wait: run as a script by
`test_embedded_supervisor.py`, with the data directory and the ready file."""

from __future__ import annotations

import sys
from pathlib import Path

from adapters.embedded.process import CannotStart
from adapters.embedded.supervisor import Supervisor
from adapters.process.settings import Settings, process_environment

API = """
import http.server, json, os, signal, socket
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"ready": True, "runners": 1, "pid": os.getpid()}).encode()
        self.send_response(200); self.send_header("content-length", str(len(body)))
        self.end_headers(); self.wfile.write(body)
listener = socket.socket(fileno=int(os.environ["GRIDLINE_LISTEN_FD"]))
server = http.server.HTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
server.socket.close()
server.socket = listener
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
server.serve_forever()
"""
CLIENT = """
import os, signal
print(os.environ["GRIDLINE_KAFKA_CLUSTER_ID"], os.environ["GRIDLINE_KAFKA_BOOTSTRAP"], flush=True)
signal.pause()
"""
STUBBORN = CLIENT.replace(
    "signal.pause()",
    """
signal.signal(signal.SIGTERM, lambda *_: print("asked to end", flush=True))
signal.pause()
signal.pause()
""",
)
STUBBORN_RUNNER = "stubborn runner"
"""Instead of a broken program's name: the runner works on until it was asked twice."""
BROKEN = "raise SystemExit('broken on purpose')"


def main() -> None:
    directory, ready_file, *broken = sys.argv[1:]
    programs = {"api": ("-c", API), "worker": ("-c", CLIENT), "runner": ("-c", CLIENT)}
    if STUBBORN_RUNNER in broken:
        broken.remove(STUBBORN_RUNNER)
        programs["runner"] = ("-c", STUBBORN)
    programs |= dict.fromkeys(broken, ("-c", BROKEN))
    supervisor = Supervisor(
        directory=Path(directory),
        port=0,
        ready_file=Path(ready_file),
        settings=Settings(),
        say=lambda text: print(text, flush=True),
        prepare=lambda settings: "gl_test",
        programs=programs,
    )
    try:
        supervisor.run(process_environment())
    except CannotStart as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
