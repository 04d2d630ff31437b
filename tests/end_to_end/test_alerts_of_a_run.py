"""A run with alerts: the webhook is told, and no file that the run writes has its address."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

from surogate import run

if TYPE_CHECKING:
    from end_to_end.product import Workplace

SECRET = "hunter2-of-the-webhook"


def test_a_run_tells_its_end_and_keeps_the_address_to_itself(here: Workplace) -> None:
    received = list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    server, printed = HTTPServer(("127.0.0.1", 0), Handler), list[str]()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        alerts = {"url": f"http://127.0.0.1:{server.server_port}/{SECRET}", "events": ["done", "nan"]}
        run.train(run.load(here.write(max_steps=2, save_steps=1, alerts=alerts)), printed.append)
    finally:
        server.shutdown()
        server.server_close()
    assert [(one["event"], one["step"]) for one in received] == [("done", 2)]
    written = [path for path in here.out.rglob("*") if path.is_file()]
    assert written and not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert not any(SECRET in line for line in printed)
