"""The sources of every SGLang version in requirements/sglang-wheels.txt, as `launch/setup.sh` unpacks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .sources import Sources

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "sglang-wheels.txt"
VERSIONS = tuple(line.split()[0].removeprefix("sglang==") for line in LOCK.read_text().splitlines())
UNPACKED = ROOT / ".cache" / "sglang"

_read: dict[str, Sources] = {}


def sources_of(version: str) -> Sources:
    """What the wheel of ``version`` holds."""
    if version not in _read:
        folder = UNPACKED / version
        if not (folder / "sglang").is_dir():
            pytest.fail(
                f"no sources of SGLang {version} under {folder}: `bash launch/test.sh tests/wheels` fetches them"
            )
        _read[version] = Sources(folder)
    return _read[version]


@pytest.fixture(params=VERSIONS)
def wheel(request) -> Sources:
    """One version after the other."""
    return sources_of(request.param)
