"""The modes and options there are, and `MtpConfig`: what the operator asked for. The only reader of the plugin's flags
and environment variables.

Flags, keywords of `sgl.Engine` and environment variables are spellings of the same options. The first two win and are
exported into the environment, which every worker process inherits: workers read the environment only. How an option was
spelled is exported too (`SPELLINGS`), so that every process names it as its operator did.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import MtpError
from .names import OFF, REPLAY, REWIND, SGLANG, SLOTS, SNAPSHOT


@dataclass(frozen=True)
class ModeEntry:
    """What the operator is told of a mode: ``summary`` is its line in ``--help``, ``options`` names the `OPTIONS` that
    change anything in it."""

    summary: str
    options: frozenset[str] = frozenset()


#: In the order of ``--help``. What each mode is made of is in `modes`, which needs SGLang.
MODES: dict[str, ModeEntry] = {
    REPLAY: ModeEntry(
        "read the state once per verify, keep inputs in a window, write the state once per several steps",
        frozenset({"window", "state_layout", "radix"}),
    ),
    SLOTS: ModeEntry(
        "write each draft node's state to a slot of the pool, commit by moving an index", frozenset({"state_layout"})
    ),
    SNAPSHOT: ModeEntry("SGLang's own verify, a copy of the state per draft node, with this plugin's fixes"),
    OFF: ModeEntry("SGLang unchanged"),
}

#: What is served if nobody asks for a mode.
DEFAULT_MODE = REPLAY


def _mode(text: str) -> str:
    """A mode."""
    if text not in MODES:
        raise ValueError("no such mode")
    return text


def _window(text: str) -> int:
    """A number of tokens, zero or more."""
    window = int(text)
    if window < 0:
        raise ValueError("negative")
    return window


#: Values of ``--mamba-mtp-state-layout`` (`state.axis_order.CHOICES` says what they mean).
STATE_LAYOUTS = ("vk", "kv", "auto")


def _state_layout(text: str) -> str:
    """Order of a state's last two axes."""
    if text not in STATE_LAYOUTS:
        raise ValueError("not a layout")
    return text


#: Values of ``--mamba-mtp-radix``.
RADIX = (REWIND, SGLANG)


def _radix(text: str) -> str:
    """Who decides what the radix cache is given."""
    if text not in RADIX:
        raise ValueError("no such strategy")
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
        """Attribute of the parsed flags, and keyword of an engine."""
        return self.flag.removeprefix("--").replace("-", "_")

    def spelled(self, text: str, spelling: str) -> str:
        """The option with its value, and in ``spelling``."""
        return {FLAG: f"{self.flag} {text}", KEYWORD: f"{self.dest}={text}"}.get(spelling, f"{self.env}={text}")


OPTIONS: dict[str, Option] = {
    option.name: option
    for option in (
        Option(
            name="mode",
            flag="--mamba-mtp-mode",
            env="SGLANG_MAMBA_MTP_MODE",
            parse=_mode,
            expects="one of " + ", ".join(MODES),
            help="How target verify treats the recurrent state of hybrid linear-attention models. ",
        ),
        Option(
            name="window",
            flag="--mamba-mtp-window",
            env="SGLANG_MAMBA_MTP_WINDOW",
            parse=_window,
            expects="a number of tokens, 0 or more",
            help="Tokens a request may have pending before a verify folds them into its state; 0 folds at every step. "
            "Default: 16 less the draft's nodes up to 4 of them, 20 for 16 of them, else 16.",
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
        Option(
            name="radix",
            flag="--mamba-mtp-radix",
            env="SGLANG_MAMBA_MTP_RADIX",
            parse=_radix,
            expects="rewind or sglang",
            help="Where --mamba-radix-cache-strategy is left to SGLang: rewind takes no snapshots while decoding and "
            "gives a request's own slot to the radix cache at its exact length, two state slots a request in place of "
            "five; sglang leaves the strategy as SGLang chooses it. Default: rewind, and what SGLang chooses where the "
            "server cannot (its first line says why).",
        ),
    )
}


#: Environment variable: which options were given as FLAG or KEYWORD (``mode=flag,window=flag``), for messages.
SPELLINGS = "SGLANG_MAMBA_MTP_SPELLINGS"
FLAG, KEYWORD, VARIABLE = "flag", "keyword", "variable"

#: How to take an option back.
_TAKE_BACK = {FLAG: "leave the flag out", KEYWORD: "leave the keyword out", VARIABLE: "unset the variable"}


def _spellings(environ: Mapping[str, str]) -> dict[str, str]:
    """By option name; an option that is not in it was given as a variable."""
    entries = (entry.partition("=") for entry in environ.get(SPELLINGS, "").split(","))
    return {name: spelling for name, _, spelling in entries if spelling}


@dataclass(frozen=True)
class MtpConfig:
    """The options in force. Build it with `from_env`."""

    mode: str = DEFAULT_MODE
    #: None: by the size of the drafts (`state.window.threshold_for`)
    window: int | None = None
    state_layout: str = "auto"
    radix: str = REWIND
    #: option name -> as the operator spelled it, value included, for messages
    given: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> MtpConfig:
        """Read and check the environment.

        Raises
            MtpError: a value cannot be read, or an option does nothing in the mode.
        """
        environ = os.environ if environ is None else environ
        spellings = _spellings(environ)
        values: dict[str, Any] = {}
        given: dict[str, str] = {}
        for option in OPTIONS.values():
            text = environ.get(option.env, "").strip()
            if not text:
                continue
            spelling = spellings.get(option.name, VARIABLE)
            given[option.name] = option.spelled(text, spelling)
            try:
                values[option.name] = option.parse(text)
            except ValueError:
                undo = _TAKE_BACK[spelling] + (f" (the flag is {option.flag})" if spelling == VARIABLE else "")
                raise MtpError(
                    f"{given[option.name]}: expected {option.expects}; correct the value or {undo}"
                ) from None
        config = cls(**values, given=given)
        for name in given:
            if name != "mode" and name not in MODES[config.mode].options:
                undo = _TAKE_BACK[spellings.get(name, VARIABLE)]
                raise MtpError(
                    f"{given[name]}: no effect in mode {config.mode!r}; {undo}" + _choose_instead(name, config.mode)
                )
        return config

    def spelled(self, name: str) -> str:
        """An option with its value, as the operator spelled it; one not given as its flag would be."""
        return self.given.get(name) or OPTIONS[name].spelled(str(getattr(self, name)), FLAG)

    def instead(self, mode: str) -> str:
        """How the operator asks for another mode, and what of the options given has no place there."""
        option = OPTIONS["mode"]
        if any(text.startswith("mamba_mtp_") for text in self.given.values()):
            words = option.spelled(repr(mode), KEYWORD)
        else:
            words = f"{option.spelled(mode, FLAG)} ({option.spelled(mode, VARIABLE)})"
        idle = [text for name, text in self.given.items() if name != "mode" and name not in MODES[mode].options]
        return words + (f", without {' and '.join(idle)}" if idle else "")


def _choose_instead(option: str, current: str) -> str:
    able = [name for name, mode in MODES.items() if option in mode.options and name != current]
    return f", or choose mode {' or '.join(able)}" if able else ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to SGLang's parser."""
    group = parser.add_argument_group("mamba-mtp (sglang_mamba_mtp plugin)")
    for option in OPTIONS.values():
        group.add_argument(
            option.flag,
            dest=option.dest,
            default=None,
            metavar="{" + ",".join(MODES) + "}" if option.name == "mode" else None,
            help=option.help + (_mode_help() if option.name == "mode" else "") + f" Environment: {option.env}.",
        )


def _mode_help() -> str:
    return "; ".join(f"{name}: {mode.summary}" for name, mode in MODES.items()) + f". Default: {DEFAULT_MODE}."


def take_flags(parsed: argparse.Namespace, environ: MutableMapping[str, str] | None = None) -> MtpConfig:
    """Export the flags that were given into ``environ`` (None: this process's), then read the configuration from it.

    Raises
        MtpError: see `MtpConfig.from_env`.
    """
    global _on_command_line
    if environ is None:
        environ, _on_command_line = os.environ, True
    return _take(vars(parsed), FLAG, environ)


def take_keywords(given: Mapping[str, Any]) -> MtpConfig:
    """The same with an engine's keywords, into this process's environment.

    Raises
        MtpError: see `MtpConfig.from_env`.
    """
    return _take(given, KEYWORD, os.environ)


def _take(given: Mapping[str, Any], spelling: str, environ: MutableMapping[str, str]) -> MtpConfig:
    """``given``: by `Option.dest`, None for none."""
    spellings = _spellings(environ)
    for option in OPTIONS.values():
        value = given.get(option.dest)
        if value is not None:
            if not str(value).strip():
                raise MtpError(
                    f"{option.spelled(repr(value), spelling)}: expected {option.expects}; give a value or "
                    f"{_TAKE_BACK[spelling]}"
                )
            environ[option.env] = str(value)
            spellings[option.name] = spelling
    if spellings:
        environ[SPELLINGS] = ",".join(f"{name}={how}" for name, how in sorted(spellings.items()))
    return MtpConfig.from_env(environ)


def _flags_of(argv: Sequence[str]) -> argparse.Namespace:
    """Our flags on the command line ``argv``; none where one lacks its value, which SGLang's parser will name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    try:
        return parser.parse_known_args(list(argv))[0]
    except argparse.ArgumentError:
        return argparse.Namespace()


def mode_asked_for(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> str | None:
    """The mode that the command line ``argv`` names, or else the environment, as it is written; None if neither does.

    For who has to know before SGLang parses its flags.
    """
    option, environ = OPTIONS["mode"], os.environ if environ is None else environ
    return getattr(_flags_of(argv), option.dest, None) or environ.get(option.env, "").strip() or None


def to_come(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> MtpConfig:
    """The configuration of a process with the command line ``argv`` once SGLang has parsed its flags, which win over
    the environment. Nothing is exported.

    Raises
        MtpError: see `MtpConfig.from_env`.
    """
    return _take(vars(_flags_of(argv)), FLAG, dict(os.environ if environ is None else environ))


_on_command_line = False


def on_command_line() -> bool:
    """Whether this process took its options from a command line, so that a refusal is for the terminal."""
    return _on_command_line


def current() -> MtpConfig:
    """The configuration of this process, from its environment."""
    return MtpConfig.from_env()
