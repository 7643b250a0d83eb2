"""MtpConfig: what the operator asked for. The only reader of the plugin's flags and environment variables.

Flags and environment variables are two spellings of the same options. A flag wins and is exported into the
environment, which every worker process inherits: workers read the environment only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from . import modes
from .errors import MtpError


def _window(text: str) -> int:
    """A number of tokens, zero or more."""
    window = int(text)
    if window < 0:
        raise ValueError("negative")
    return window


#: Values of ``--mamba-mtp-state-layout`` (`layout.CHOICES` says what they mean).
STATE_LAYOUTS = ("vk", "kv", "auto")


def _state_layout(text: str) -> str:
    """Order of a state's last two axes."""
    if text not in STATE_LAYOUTS:
        raise ValueError("not a layout")
    return text


@dataclass(frozen=True)
class Option:
    """One option: its flag, its environment variable, how its text is read."""

    name: str
    flag: str
    env: str
    parse: Callable[[str], Any]
    expects: str
    help: str

    @property
    def dest(self) -> str:
        """Attribute of the parsed flags."""
        return self.flag.removeprefix("--").replace("-", "_")


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            name="mode",
            flag="--mamba-mtp-mode",
            env="SGLANG_MAMBA_MTP_MODE",
            parse=str,
            expects="one of " + ", ".join(modes.MODES),
            help="How target verify treats the recurrent state of hybrid linear-attention models. ",
        ),
        Option(
            name="window",
            flag="--mamba-mtp-window",
            env="SGLANG_MAMBA_MTP_WINDOW",
            parse=_window,
            expects="a number of tokens, 0 or more",
            help="Tokens a request may have pending before a verify folds them into its state; 0 folds at every step.",
        ),
        Option(
            name="state_layout",
            flag="--mamba-mtp-state-layout",
            env="SGLANG_MAMBA_MTP_STATE_LAYOUT",
            parse=_state_layout,
            expects="vk, kv or auto",
            help="Order of the last two axes of the recurrent states that verify and fold write: vk as SGLang keeps "
            "them, kv, or auto, the faster one as measured (vk). Kernels read either.",
        ),
    )
}


@dataclass(frozen=True)
class MtpConfig:
    """The options in force. Build it with `from_env`."""

    mode: str = modes.DEFAULT.name
    window: int = 8
    state_layout: str = "auto"
    #: option name -> the spelling it was given with, for messages
    given: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> MtpConfig:
        """Read and check the environment.

        Raises
            MtpError: a value cannot be read, the mode cannot be served, or an option does nothing in the mode.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        given: dict[str, str] = {}
        for option in OPTIONS.values():
            text = environ.get(option.env, "").strip()
            if not text:
                continue
            given[option.name] = f"{option.env}={text}"
            try:
                values[option.name] = option.parse(text)
            except ValueError:
                raise MtpError(
                    f"{option.env}={text}: expected {option.expects} (the flag is {option.flag}); "
                    f"correct the value or unset the variable"
                ) from None
        config = cls(**values, given=given)
        mode = modes.build(config)
        for name in given:
            if name != "mode" and name not in mode.options:
                raise MtpError(
                    f"{config.source(name)} has no effect in mode {mode.name!r}: unset it"
                    + _choose_instead(name, mode.name)
                )
        return config

    def source(self, name: str) -> str:
        """How the option was given, for messages: ``SGLANG_MAMBA_MTP_MODE=replay (--mamba-mtp-mode)``."""
        option = OPTIONS[name]
        return f"{self.given[name]} ({option.flag})" if name in self.given else f"{option.flag}, by default"


def _choose_instead(option: str, current: str) -> str:
    able = [name for name, mode in modes.MODES.items() if option in mode.options and name != current]
    return f", or choose mode {' or '.join(able)}" if able else ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to SGLang's parser."""
    group = parser.add_argument_group("mamba-mtp (sglang_mamba_mtp plugin)")
    for option in OPTIONS.values():
        group.add_argument(
            option.flag,
            dest=option.dest,
            default=None,
            metavar="{" + ",".join(modes.MODES) + "}" if option.name == "mode" else None,
            help=option.help + (_mode_help() if option.name == "mode" else "") + f" Environment: {option.env}.",
        )


def _mode_help() -> str:
    parts = []
    for name, mode in modes.MODES.items():
        parts.append(f"{name}: {mode.summary}")
    return "; ".join(parts) + f". Default: {modes.DEFAULT.name}."


def take_flags(parsed: argparse.Namespace, environ: MutableMapping[str, str] | None = None) -> MtpConfig:
    """Export the flags that were given into ``environ``, then read the configuration from it.

    Raises
        MtpError: see `MtpConfig.from_env`.
    """
    environ = os.environ if environ is None else environ
    for option in OPTIONS.values():
        value = getattr(parsed, option.dest, None)
        if value is not None:
            environ[option.env] = str(value)
    return MtpConfig.from_env(environ)


def current() -> MtpConfig:
    """The configuration of this process, from its environment."""
    return MtpConfig.from_env()


def current_mode() -> modes.Mode:
    """The mode of this process, from its environment."""
    return modes.build(current())
