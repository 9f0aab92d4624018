"""An instance under the real supervisor whose programs only wait: run as a script by
`test_embedded_supervisor.py`, with the data directory and the ready file."""

from __future__ import annotations

import sys
from pathlib import Path

from adapters.embedded.process import CannotStart
from adapters.embedded.supervisor import Supervisor
from adapters.settings import Settings, process_environment

API = """
import http.server, os
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(os.environ["GRIDLINE_PORT"])), Handler).serve_forever()
"""
CLIENT = """
import os, signal
print(os.environ["GRIDLINE_KAFKA_CLUSTER_ID"], os.environ["GRIDLINE_KAFKA_BOOTSTRAP"], flush=True)
signal.pause()
"""
BROKEN = "raise SystemExit('broken on purpose')"


def main() -> None:
    directory, ready_file, *broken = sys.argv[1:]
    programs = {"api": ("-c", API), "worker": ("-c", CLIENT), "runner": ("-c", CLIENT)}
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
