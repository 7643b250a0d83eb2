"""What lets the operator choose a mode: hooks on SGLang's argument parser, the only ones in mode `off`, and keywords of
`sgl.Engine`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from .. import config
from ..errors import MtpError
from ..names import OFF
from .registry import Hook, registered


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


class EngineArguments:
    """Stands in `sgl.Engine` where it keeps the class it makes its ``ServerArgs`` with; takes our options
    (``mamba_mtp_mode`` and the others, spelt like their flags) out of the engine's keywords first.

    They hold for that engine: what the environment said before is put back when the next one is made.
    """

    def __init__(self, stock: Callable[..., Any]) -> None:
        self._stock = stock
        self._before: dict[str, str | None] = {}

    def __call__(self, **keywords: Any) -> Any:
        """SGLang's ``ServerArgs`` of the other keywords.

        Raises
            MtpError: a value is wrong, or a mode is asked for where the environment had turned the plugin off.
        """
        for name, text in self._before.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
        options = [option for option in config.OPTIONS.values() if option.dest in keywords]
        self._before = {name: os.environ.get(name) for name in (config.SPELLINGS, *(option.env for option in options))}
        asked = config.take_keywords({option.dest: keywords.pop(option.dest) for option in options})
        if asked.mode != OFF and len(registered()) == len(HOOKS):
            raise MtpError(
                f"Engine(mamba_mtp_mode={asked.mode!r}): the plugin was loaded with "
                f"{config.OPTIONS['mode'].env}={OFF}, which keeps its hooks out of this process: unset that"
            )
        return self._stock(**keywords)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def take_engine_keywords() -> None:
    """Let `sgl.Engine` take our options as keywords, in a process that has it: an engine loads the plugins before it
    makes its ``ServerArgs``."""
    module = sys.modules.get("sglang.srt.entrypoints.engine")
    if module is not None and not isinstance(module.Engine.server_args_class, EngineArguments):
        module.Engine.server_args_class = EngineArguments(module.Engine.server_args_class)
