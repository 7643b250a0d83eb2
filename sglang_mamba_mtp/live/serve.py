"""Answers browsers: Bokeh's server, with BokehJS from its wheel and nothing from anywhere else."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

from bokeh.application import Application
from bokeh.application.handlers.function import FunctionHandler
from bokeh.document import Document
from bokeh.server.server import Server
from bokeh.settings import settings

from ..errors import MtpError
from .page import Page
from .watching import Watcher

_EVERYWHERE = ("", "0.0.0.0")


def allowed_origins(host: str, port: int, more: Iterable[str] = ()) -> list[str]:
    """Where a page may come from that opens a websocket here: this machine under its names, and ``more``.

    Any other site that a browser has open is kept from reading along.
    """
    hosts = {host} - set(_EVERYWHERE) | {"127.0.0.1", "localhost"}
    if host in _EVERYWHERE:
        name = socket.gethostname()
        hosts |= {name, socket.getfqdn()}
        with contextlib.suppress(OSError):  # a name that leads nowhere
            hosts |= set(socket.gethostbyname_ex(name)[2])
    return sorted(f"{each}:{port}" for each in hosts if ":" not in each) + list(more)


def serve(watcher: Watcher, *, host: str, port: int, origins: Iterable[str] = ()) -> Server:
    """A server that listens; ``run_until_shutdown`` or its loop makes it answer.

    Raises
        MtpError: ``host`` and ``port`` cannot be listened on.
    """

    def open_page(document: Document) -> None:
        Page(document, watcher)

    settings.resources = "server"  # whatever the environment says: nothing is fetched from elsewhere
    try:
        return Server(
            {"/": Application(FunctionHandler(open_page))},
            address=host,
            port=port,
            allow_websocket_origin=allowed_origins(host, port, origins),
        )
    except OSError as error:
        reason = error.strerror or str(error)
        raise MtpError(f"cannot listen on {host}:{port}: {reason}; choose another with --host and --port") from None
