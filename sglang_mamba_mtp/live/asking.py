"""Asks a server over HTTP. What goes wrong is a `Trouble`, whose text is for the page."""

from __future__ import annotations

import ipaddress
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException

from .reading import Sample, Served, sample_of, served_of

#: Bytes of an answer that are read; SGLang's metrics are about 0.1 MB.
LARGEST_ANSWER = 32 * 2**20


class Trouble(Exception):
    """Why there is nothing to show, and what to do about it."""


def checked_url(text: str) -> str:
    """``text`` without a slash at its end.

    Raises
        ValueError: it is not the address of an HTTP server; the message says what is expected.
    """
    expected = f"{text}: expected http://HOST:PORT, as http://127.0.0.1:30000"
    try:
        parts = urllib.parse.urlsplit(text)
        parts.port  # noqa: B018 - it is checked where it is read
    except ValueError as error:
        raise ValueError(f"{expected} ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError(expected)
    return text.rstrip("/")


def _is_loopback(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Asked:
    """A server at an address."""

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        """``url`` as `checked_url` returns it; ``timeout`` in seconds, for connecting and for each read."""
        self.url = url
        self._timeout = timeout
        # this machine is never asked through a proxy of the environment
        handlers = [urllib.request.ProxyHandler({})] if _is_loopback(url) else []
        self._opener = urllib.request.build_opener(*handlers)

    def sample(self) -> Sample:
        """What ``/metrics`` says now.

        Raises
            Trouble: nobody answers, or no metrics.
        """
        try:
            text = self._get("/metrics")
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise Trouble(f"{self.url}/metrics answers with status {error.code}.") from None
            raise Trouble(
                f"The server at {self.url} has no /metrics. Start it with --enable-metrics; this page then goes on "
                f"by itself."
            ) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise Trouble(f"No server answers at {self.url} ({reason}). Asking again.") from None
        try:
            sample = sample_of(text)
        except ValueError:
            raise Trouble(f"{self.url}/metrics answers, but not with Prometheus' metrics: is it SGLang?") from None
        if not sample.values:
            raise Trouble(f"{self.url}/metrics has none of SGLang's metrics yet: is it SGLang, and is it ready?")
        return sample

    def served(self) -> Served:
        """What ``/server_info`` says; empty where it does not answer, as to somebody without its API key."""
        try:
            return served_of(self._get("/server_info"))
        except (OSError, HTTPException, ValueError):
            return Served()

    def _get(self, path: str) -> str:
        with self._opener.open(self.url + path, timeout=self._timeout) as answer:
            return answer.read(LARGEST_ANSWER).decode("utf-8", errors="replace")
