"""Which SGLang is installed, and whether the plugin supports it. Works where SGLang is missing."""

from __future__ import annotations

import importlib.metadata
import re

from ..errors import MtpError

SUPPORTED_MIN = (0, 5, 17)
SUPPORTED_BELOW = (0, 5, 24)
SUPPORTED = "sglang >=0.5.17,<0.5.24"


def sglang_version() -> str | None:
    """The installed SGLang's version, or None if there is none."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of ``version`` (suffixes such as ``.post1`` or ``+cu130`` do not matter), or ()."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return () if match is None else tuple(int(part) for part in match.groups())


def version_numbers() -> tuple[int, ...]:
    """The installed SGLang's; the oldest supported where there is none (kernels are also used without SGLang)."""
    version = sglang_version()
    return SUPPORTED_MIN if version is None else numbers(version)


def is_supported(version: str) -> bool:
    """Whether ``version`` lies in the supported range."""
    return SUPPORTED_MIN <= numbers(version) < SUPPORTED_BELOW


def require_supported_version() -> str:
    """Return SGLang's version.

    Raises
        MtpError: SGLang is missing or outside the supported range.
    """
    version = sglang_version()
    if version is None:
        raise MtpError(f"SGLang is not installed; this plugin needs {SUPPORTED}")
    if not is_supported(version):
        raise MtpError(f"SGLang {version} is installed; this plugin supports {SUPPORTED}")
    return version
