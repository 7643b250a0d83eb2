"""Hooks on SGLang's argument parser, the only ones in mode `off`: what lets the operator choose a mode."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .. import config
from ..errors import MtpError
from .registry import Hook


def offer_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """AFTER `ServerArgs.add_cli_args`: add our flags."""
    config.add_flags(parser)


def take_flags(original: Callable[..., Any], cls: type, parsed: argparse.Namespace) -> Any:
    """AROUND `ServerArgs.from_cli_args`: export our flags before SGLang resolves its own.

    Raises
        SystemExit: a value is wrong; the message says which and what to do.
    """
    try:
        config.take_flags(parsed)
    except MtpError as error:
        raise SystemExit(f"mamba-mtp: {error}") from error
    return original(cls, parsed)


ALL = frozenset(config.MODES)

HOOKS: tuple[Hook, ...] = (
    Hook("add_cli_args", "AFTER", offer_flags, ALL, "--mamba-mtp-* in --help and in the parser"),
    Hook("from_cli_args", "AROUND", take_flags, ALL, "flags into the environment, which workers inherit"),
)
