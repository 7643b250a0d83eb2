"""``python -m sglang_mamba_mtp.live --url http://127.0.0.1:30000``: a page of that server at http://127.0.0.1:7000.

The server needs ``--enable-metrics``; its ``/metrics`` is read every two seconds, whether a page is open or not, and
its ``/server_info`` when it is first seen. It may start after the page, end and come back.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import signal
import sys
from collections.abc import Sequence

from ..errors import MtpError

#: What the page is made with, beyond what the plugin needs.
NEEDED = ("bokeh", "prometheus_client")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m sglang_mamba_mtp.live",
        description="A page of a running server: accept length, tokens/s, requests, memory, windows. The server needs "
        "--enable-metrics.",
    )
    add = made.add_argument
    add("--url", default="http://127.0.0.1:30000", help="the SGLang server (default http://127.0.0.1:30000)")
    add("--host", type=_host, default="127.0.0.1", help="listen here (default 127.0.0.1, this machine only)")
    add("--port", type=_port, default=7000, help="and on this port (default 7000)")
    add("--interval", type=_interval, default=2.0, metavar="SECONDS", help="between two readings (default 2)")
    add(
        "--origin",
        type=_origin,
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="the page is opened at another address, as through a forwarded port or a proxy; may be repeated",
    )
    return made


def _host(text: str) -> str:
    if not text or ":" in text or "/" in text:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an IPv4 address or a name, as 127.0.0.1")
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise argparse.ArgumentTypeError(f"{text}: expected a port, 1 to 65535")
    return int(text)


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.2 <= value <= 600:
        raise argparse.ArgumentTypeError(f"{text}: expected seconds, 0.2 to 600")
    return value


def _origin(text: str) -> str:
    host, colon, port = text.partition(":")
    if not host or "*" in host or "/" in text or not colon or not port.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected HOST:PORT, as the browser shows it")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the page until Ctrl-C. The exit status is 0, 1 with a message, or 2 for wrong arguments."""
    made = parser()
    options = made.parse_args(argv)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"mamba-mtp: the live page needs {' and '.join(missing)}: pip install 'sglang-mamba-mtp[live]'",
            file=sys.stderr,
        )
        return 1
    from .asking import Asked, checked_url
    from .serve import serve
    from .watching import Watcher

    try:
        url = checked_url(options.url)
    except ValueError as error:
        made.error(f"argument --url: {error}")
    watcher = Watcher(Asked(url), options.interval)
    try:
        server = serve(watcher, host=options.host, port=options.port, origins=options.origin)
    except MtpError as error:
        print(f"mamba-mtp: {error}", file=sys.stderr)
        return 1
    # a shell starts what runs in its background deaf to Ctrl-C's signal, and it is promised that this ends it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    watcher.start()
    with contextlib.suppress(KeyboardInterrupt):  # where Bokeh does not expect it yet
        print(f"mamba-mtp: {url} is shown at http://{options.host}:{options.port} until Ctrl-C", flush=True)
        server.run_until_shutdown()
    watcher.stop()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
