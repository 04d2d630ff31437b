"""Sends short messages to a webhook from a thread. Nothing waits for it, and no message shows its address."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

TIMEOUT_SECONDS = 10.0
WAITS = (1.0, 5.0, 25.0)
"""Seconds before each further try."""

CLOSE_SECONDS = 15.0
"""For what is not sent when a run ends."""

_LOST = (400, 401, 403, 404, 405, 410)
"""HTTP statuses that another try does not mend."""


class Webhook:
    """Posts messages as JSON, in order. Tells `notice` of one that it could not send, never with the address."""

    def __init__(self, address: str, notice: Callable[[str], None], waits: tuple[float, ...] = WAITS) -> None:
        self._address, self._notice, self._waits = address, notice, waits
        self._queue: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="alerts", daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        self._queue.put(message)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Wait for what is queued, for some seconds at most. Further tries are made at once."""
        self._queue.put(None)
        self._ended.set()
        self._thread.join(seconds)

    def _send_all(self) -> None:
        while (message := self._queue.get()) is not None:
            if reason := self._sent(message):
                self._notice(f"alerts: {message['event']} was not sent: {reason}")

    def _sent(self, message: Mapping[str, Any]) -> str:
        """Send a message, several times if need be. Return why that failed; "" if it did not."""
        reason = ""
        for wait in (0.0, *self._waits):
            if wait:
                self._ended.wait(wait)
            try:
                self._post(message)
                return ""
            except urllib.error.HTTPError as error:
                reason = f"the server answers {error.code}"
                error.close()
                if error.code in _LOST:
                    return f"{reason}. Check the address of alerts"
            except Exception as error:  # whatever a server or a proxy does must not end the thread
                cause = getattr(error, "reason", None) or error
                reason = f"{type(error).__name__}: {cause}".replace(self._address, "***")
        return f"{reason} ({1 + len(self._waits)} tries)"

    def _post(self, message: Mapping[str, Any]) -> None:
        body = json.dumps({**message, "time": time.time()}).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "surogate"}
        request = urllib.request.Request(self._address, body, headers, method="POST")
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            pass
