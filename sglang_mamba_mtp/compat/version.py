"""Which SGLang is installed, and whether the plugin supports it; whether our kernels are of the plugin's version. Works
where SGLang is missing."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

from .. import __version__
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


def require_matching_kernels() -> None:
    """The kernels lie in a package of their own, which an older installation or ``PYTHONPATH`` may bring.

    Raises
        MtpError: `mamba_mtp_kernels` is missing or of another version than the plugin; the message says where each is.
    """
    found, where = _kernels()
    if found != __version__:
        raise MtpError(
            f"the plugin is {__version__} ({Path(__file__).parents[1]}), its kernels are {found} ({where}): they come "
            f"from two installations. Uninstall sglang-mamba-mtp until no copy is left, look for an older one on "
            f"PYTHONPATH, then install it once"
        )


def _kernels() -> tuple[str, str]:
    """Version and folder of the `mamba_mtp_kernels` that would be used, as text for people."""
    try:
        # A namespace package: installed twice it has two folders, and the first one that has a module gives it.
        folder = Path(next(iter(importlib.import_module("mamba_mtp_kernels").__path__)))
    except ModuleNotFoundError:
        return "missing", "there is no package mamba_mtp_kernels"
    try:
        version = importlib.import_module("mamba_mtp_kernels.version")
    except ModuleNotFoundError:
        return "older than any with a version", str(folder)
    if Path(str(version.__file__)).parent != folder:
        return "older than any with a version", f"{folder}, before {Path(str(version.__file__)).parent}"
    return version.__version__, str(folder)
