"""JSON over HTTP with patience: what may pass is tried again, what cannot is one sentence."""

import http.client
import json
import math
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from distill.errors import UserError

T = TypeVar("T")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
LONGEST_RETRY_AFTER_S = 600.0
CONNECT_S = 20.0

PASSING = {408, 425, 429}
"""Statuses below 500 that another try may not meet."""


class RefusedError(UserError):
    """The server does not take the request, however often it is sent; ``status`` is HTTP's."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


class Client:
    """Calls one server; may be used by many threads at once.

    A connection per call: an answer takes seconds, and a server that went away and came back is met afresh.

    Args:
        url: base address, ``http://host:8000/v1``.
        timeout_s: seconds the server may be silent.
        retries: further tries after the first.
        key: sent as a bearer token.

    Each pause is twice as long as the one before, less a random part of up to half, so that many callers do not come
    back at once.
    """

    def __init__(self, url: str, *, timeout_s: float, retries: int, key: str | None = None):
        self.url = url
        try:
            self._parts = urlsplit(url)
            _ = self._parts.port
        except ValueError as error:
            raise UserError(
                f"data.endpoint.url must be an address like http://host:8000/v1, got {url!r} ({error})"
            ) from error
        self._timeout_s, self._retries = timeout_s, retries
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def close(self) -> None:
        """Break off pauses and calls in other threads; they raise."""
        self._closed.set()
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def call(self, path: str, body: dict[str, Any] | None = None, *, read: Callable[[dict[str, Any]], T]) -> T:
        """GET, or POST with a body; returns what ``read`` makes of the answer.

        Args:
            path: behind the base address.
            body: sent as JSON.
            read: an answer it fails on (but for a ``UserError``) counts as broken and is asked for again.

        Raises:
            RefusedError: the server says no (4xx).
            UserError: it stays unreachable, broken or overloaded through all tries.
        """
        fault = ""
        for attempt in range(self._retries + 1):
            try:
                status, retry_after, data = self._once(path, body)
                if status == 200:
                    return read(json.loads(data))
                if status < 500 and status not in PASSING:
                    raise RefusedError(
                        f"endpoint {self.url}{path} must take the request, got status {status} ({_message(data)})"
                        + ("; data.endpoint.url usually ends in /v1" if status == 404 else ""),
                        status,
                    )
                fault, least_s = f"status {status} ({_message(data)})", _seconds(retry_after)
            except UserError:
                raise
            except TimeoutError:
                fault, least_s = f"nothing in {self._timeout_s:g} s", 0.0
            except (OSError, http.client.HTTPException) as error:
                fault, least_s = _words(error), 0.0
            except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
                fault, least_s = f"a broken answer ({type(error).__name__}: {error})", 0.0
            if attempt < self._retries:
                self._pause(attempt, least_s)
        tries = f"{self._retries + 1} tries" if self._retries else "one try"
        raise UserError(
            f"endpoint {self.url} must answer, got {fault} after {tries}; what was written so far is kept: "
            "see to the server and start again to go on"
        )

    def _once(self, path: str, body: dict[str, Any] | None) -> tuple[int, str | None, bytes]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        # Nothing can break off a connection that is being made, so that must not take long.
        connection = kind(self._parts.netloc.rpartition("@")[2], timeout=min(CONNECT_S, self._timeout_s))
        with self._lock:
            self._open.add(connection)
        try:
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
            self._check_open()
            data = None if body is None else json.dumps(body).encode()
            headers = {**self._headers, "Connection": "close"}
            connection.request("GET" if body is None else "POST", self._parts.path + path, data, headers)
            with connection.getresponse() as response:
                return response.status, response.getheader("Retry-After"), response.read()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _pause(self, attempt: int, least_s: float) -> None:
        usual_s = min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S)
        self._closed.wait(max(usual_s * random.uniform(0.5, 1.0), least_s))
        self._check_open()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise UserError(f"endpoint {self.url} is closed: writing has stopped")


def _seconds(retry_after: str | None) -> float:
    """What a Retry-After header asks for, as seconds or as a date; 0 when it asks for nothing."""
    if not retry_after:
        return 0.0
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S) if math.isfinite(seconds) else 0.0


def _message(data: bytes) -> str:
    """What an error's body says, in one line."""
    text = data.decode("utf-8", "replace")
    with suppress(ValueError, AttributeError):
        answer = json.loads(text)
        error = answer.get("error", answer)
        text = str(error.get("message") or error.get("detail") or text) if isinstance(error, dict) else str(error)
    return " ".join(text.split())[:200] or "no text"


def _words(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "a refused connection"
    if isinstance(error, http.client.IncompleteRead):
        return "an answer that was cut off"
    if isinstance(error, ConnectionError | http.client.RemoteDisconnected):
        return "a broken connection"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
