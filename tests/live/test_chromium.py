"""The page in a browser: loaded, filled, legible, and picked up again after an outage."""

from __future__ import annotations

import asyncio
import struct
import zlib
from pathlib import Path

import pytest

pytest.importorskip("bokeh", reason="the live page's extra is not installed")

from . import chromium
from .test_command import page  # noqa: F401 - a fixture

pytestmark = pytest.mark.skipif(
    chromium.installed() is None, reason=f"no browser: none of {', '.join(chromium.NAMES)} is on PATH"
)
WIDTH, HEIGHT = 1280, 900
#: Canvases and boxes of text that reach out of the window, and figures that cover each other.
OUTSIDE = """all.filter((e) => e.matches('.bk-Figure, .tile, .head') && shown(e)).map((e) => e.getBoundingClientRect())
  .filter((r) => r.left < 0 || r.right > innerWidth || r.bottom > innerHeight).length"""
FIGURES = "all.filter((e) => e.matches('.bk-Figure') && shown(e)).length"


def colours(png: bytes) -> int:
    """How many different rows of pixels a PNG has: 1 where nothing is drawn."""
    at, packed = 8, b""
    while at < len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        packed += png[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    raw = zlib.decompress(packed)
    row = len(raw) // HEIGHT
    return len({raw[start : start + row] for start in range(0, len(raw), row)})


def test_the_page_in_a_browser(page, fake, tmp_path: Path):  # noqa: F811
    async def look() -> bytes:
        async with chromium.tab(tmp_path / "profile") as tab:
            await tab.open(page, WIDTH, HEIGHT)
            assert await tab.wait("value('requests waiting')") == "5"
            assert "replay" in await tab.ask("text('.head')")
            assert await tab.wait(f"{FIGURES} === 9")
            assert await tab.ask(OUTSIDE) == 0
            png = await tab.picture(tmp_path / "page.png")
            fake.stop()
            assert "No server answers" in await tab.wait("text('.trouble')")
            assert await tab.ask(OUTSIDE) == 0
            fake.start_again()
            await tab.wait("value('requests waiting') === '5' && text('.trouble') === ''")
            assert tab.hosts == {page.removeprefix("http://")}, "everything comes from this machine"
            assert tab.complaints == []
            return png

    png = asyncio.run(look())
    assert struct.unpack(">II", png[16:24]) == (WIDTH, HEIGHT)
    assert colours(png) > 100
