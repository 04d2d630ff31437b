"""Requests to a server in JSON. An answer is data: nothing of it is executed, and it is printed without controls."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import IO, Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from surogate_core.errors import ConfigError

KEY: Final = "SUROGATE_SERVING_API_KEY"
"""The environment variable with the server's key. A key of another program is never sent to a server."""

LARGEST: Final = 1 << 28
"""Bytes of an answer that are read."""

_PAUSE: Final = 1.0
_LINE_SECONDS: Final = 10.0
_STARTING: Final = (429, 502, 503)
"""Statuses of a server that starts, or that has too much to do."""
_SHOWN: Final = 300
"""Characters of an answer that a message has."""


class Refused(ConfigError):
    """A request that the server refuses. status: of HTTP. said: the text of the answer."""

    def __init__(self, route: str, status: int, said: str) -> None:
        super().__init__(f"the server refuses {route} with status {status}: {said}. Look at its log.")
        self.status, self.said = status, said


class _NoRedirects(HTTPRedirectHandler):
    """Leaves a redirection an error: the key would go to another host."""

    def redirect_request(self, *args: Any) -> None:
        return None


@dataclass(frozen=True)
class Connection:
    """A server.

    url      without a slash at its end, and without /v1
    timeout  seconds that are waited for an answer, and for the first one of a server that starts
    notice   is called with lines on waiting
    """

    url: str
    timeout: float
    notice: Callable[[str], None]

    def get(self, route: str) -> Any:
        """Return the answer to GET. Raises ConfigError if there is none."""
        return self._answer(route, None)

    def post(self, route: str, body: Mapping[str, Any]) -> Any:
        """Return the answer to POST, for which a server that is busy is asked again.

        Raises Refused for a status of an error, ConfigError if there is no answer.
        """
        return self._patiently(lambda: self._answer(route, json.dumps(body).encode()), gone=False)

    def wait(self, route: str) -> Any:
        """Return the answer to GET, of a server that may not be up yet."""
        return self._patiently(lambda: self.get(route), gone=True)

    def _patiently(self, ask: Callable[[], Any], gone: bool) -> Any:
        """Ask until the server answers. gone: whether a server that is not there is waited for."""
        began = said = time.monotonic()
        while True:
            try:
                return ask()
            except _NotUp as error:
                if not (gone or error.busy):
                    raise
                now = time.monotonic()
                if now + _PAUSE - began > self.timeout:
                    raise ConfigError(
                        f"{self.url}: no server answers after {now - began:.0f} s ({error.reason}). Start it, correct "
                        "the URL, or wait longer with --timeout."
                    ) from None
                if said == began or now - said >= _LINE_SECONDS:
                    said = now
                    left = self.timeout - (now - began)
                    self.notice(f"{self.url} does not answer yet ({error.reason}); waiting up to {left:.0f} s")
                time.sleep(_PAUSE)

    def _answer(self, route: str, data: bytes | None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        try:
            with _opened(Request(f"{self.url}{route}", data, headers), self.timeout) as answer:
                content = answer.read(LARGEST + 1)
        except HTTPError as error:
            raise self._refused(route, error) from None
        except TimeoutError:
            raise self._late(route) from None
        except URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._late(route) from None
            reason = getattr(error.reason, "strerror", None) or error.reason
            if isinstance(error.reason, ConnectionError):
                raise _NotUp(self.url, str(reason)) from None
            raise ConfigError(f"{self.url}: {shown(str(reason))}. Correct the URL.") from None
        except (OSError, HTTPException) as error:
            raise _NotUp(f"{self.url}{route}", type(error).__name__) from None
        if len(content) > LARGEST:
            raise ConfigError(f"{self.url}{route}: the answer has more than {LARGEST:,} bytes. Is this a model server?")
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            said = shown(content[:_SHOWN].decode(errors="replace"))
            raise ConfigError(f"{self.url}{route}: the answer is no JSON: {said!r}. Is this a model server?") from None

    def _late(self, route: str) -> ConfigError:
        return ConfigError(
            f"{self.url}{route}: no answer within {self.timeout:.0f} s. Wait longer with --timeout, or look at the "
            "server's log."
        )

    def _refused(self, route: str, error: HTTPError) -> ConfigError:
        """Return what a status of an error means."""
        if error.code in (401, 403):
            said = "the key in it is not the server's" if os.environ.get(KEY) else "the server wants a key"
            return ConfigError(f"{self.url}: status {error.code}: {said}. Set {KEY} in the environment.")
        if 300 <= error.code < 400:
            return ConfigError(f"{self.url}{route}: is redirected, which is not followed. Name the server itself.")
        if error.code in _STARTING:
            return _NotUp(f"{self.url}{route}", f"status {error.code}", busy=True)
        return Refused(f"{self.url}{route}", error.code, _said(error))


class _NotUp(ConfigError):
    """No answer, as of a server that starts. reason: why, in a few words. busy: whether the server has said so."""

    def __init__(self, where: str, reason: str, busy: bool = False) -> None:
        super().__init__(f"{where}: {reason}. Start the server, or look at its log.")
        self.reason, self.busy = reason, busy


def _opened(request: Request, timeout: float) -> HTTPResponse:
    local = urlsplit(request.full_url).hostname in ("localhost", "127.0.0.1", "::1")
    handlers = [_NoRedirects(), *([ProxyHandler({})] if local else [])]
    answer: HTTPResponse = build_opener(*handlers).open(request, timeout=timeout)
    return answer


def _said(error: IO[bytes]) -> str:
    try:
        text = error.read(1 << 16).decode(errors="replace")
    except (OSError, HTTPException):
        return "no text"
    return shown(text)


def shown(text: str) -> str:
    """Return the beginning of a server's text as it can be printed: no controls, and not the key."""
    if key := os.environ.get(KEY):
        text = text.replace(key, "***")
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def server_url(given: str) -> str:
    """Return the address of a server without /v1. Raises ConfigError for what is no address of HTTP."""
    try:
        parts = urlsplit(given)
        named, port = parts.hostname, parts.port  # reading the port checks it
    except ValueError as error:
        raise ConfigError(f"{shown(given)}: {error}. Write http://127.0.0.1:8000.") from None
    if parts.scheme not in ("http", "https") or not named or port == 0:
        raise ConfigError(f"{shown(given)}: is no address of a server. Write http://127.0.0.1:8000, or name a folder.")
    if parts.username or parts.password:
        raise ConfigError(f"{named}: the URL has a user or a password. Put the server's key into {KEY}.")
    if parts.query or parts.fragment:
        raise ConfigError(f"{shown(given)}: leave out what follows the path.")
    return given.rstrip("/").removesuffix("/v1").rstrip("/")
