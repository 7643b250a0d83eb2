"""Flags and environment variables: two spellings of the same options, read in one place."""

from __future__ import annotations

import argparse

import pytest

from sglang_mamba_mtp import config
from sglang_mamba_mtp.config import OPTIONS, MtpConfig
from sglang_mamba_mtp.errors import MtpError


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    return parser.parse_args(argv)


def test_defaults():
    assert MtpConfig.from_env({}) == MtpConfig()
    assert MtpConfig.from_env({}).mode == config.DEFAULT_MODE


def test_environment():
    assert MtpConfig.from_env({"SGLANG_MAMBA_MTP_MODE": "snapshot"}).mode == "snapshot"
    assert MtpConfig.from_env({"SGLANG_MAMBA_MTP_MODE": " "}).mode == config.DEFAULT_MODE


def test_flag_wins_and_is_exported():
    environ = {"SGLANG_MAMBA_MTP_MODE": "off"}
    assert config.take_flags(parse("--mamba-mtp-mode", "snapshot"), environ).mode == "snapshot"
    assert environ == {"SGLANG_MAMBA_MTP_MODE": "snapshot", config.SPELLINGS: "mode=flag"}
    assert MtpConfig.from_env(environ).mode == "snapshot"


def test_options_are_named_as_they_were_spelled():
    """In the launcher, and in the workers that inherit its environment."""
    environ = {"SGLANG_MAMBA_MTP_STATE_LAYOUT": "kv", "SGLANG_MAMBA_MTP_WINDOW": "3"}
    launcher = config.take_flags(parse("--mamba-mtp-window", "12"), environ)
    for given in (launcher, MtpConfig.from_env(environ), config.take_flags(parse(), environ)):
        assert given.window == 12
        assert given.spelled("window") == "--mamba-mtp-window 12"
        assert given.spelled("state_layout") == "SGLANG_MAMBA_MTP_STATE_LAYOUT=kv"
        assert given.spelled("mode") == f"--mamba-mtp-mode {config.DEFAULT_MODE}"


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--mamba-mtp-window", "abc"], ["--mamba-mtp-window abc: ", "0 or more", "leave the flag out"]),
        (["--mamba-mtp-mode", "fast"], ["--mamba-mtp-mode fast: ", "snapshot", "off"]),
        (["--mamba-mtp-mode", "off", "--mamba-mtp-window", "4"], ["--mamba-mtp-window 4: no effect", "'off'"]),
    ],
)
def test_a_wrong_flag_is_not_called_a_variable(argv, words):
    with pytest.raises(MtpError) as caught:
        config.take_flags(parse(*argv), {})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "SGLANG_" not in str(caught.value)


def test_no_flag_leaves_the_environment():
    environ = {"SGLANG_MAMBA_MTP_MODE": "off"}
    assert config.take_flags(parse(), environ).mode == "off"
    assert config.take_flags(argparse.Namespace(), environ).mode == "off"
    assert environ == {"SGLANG_MAMBA_MTP_MODE": "off"}


@pytest.mark.parametrize(
    "environ, words",
    [
        ({"SGLANG_MAMBA_MTP_MODE": "fast"}, ["SGLANG_MAMBA_MTP_MODE=fast", "--mamba-mtp-mode", "snapshot", "off"]),
        ({"SGLANG_MAMBA_MTP_WINDOW": "many"}, ["SGLANG_MAMBA_MTP_WINDOW=many", "--mamba-mtp-window", "0 or more"]),
        ({"SGLANG_MAMBA_MTP_WINDOW": "-1"}, ["SGLANG_MAMBA_MTP_WINDOW=-1", "--mamba-mtp-window"]),
        ({"SGLANG_MAMBA_MTP_STATE_LAYOUT": "VV"}, ["SGLANG_MAMBA_MTP_STATE_LAYOUT=VV", "vk, kv or auto"]),
        (
            {"SGLANG_MAMBA_MTP_MODE": "off", "SGLANG_MAMBA_MTP_WINDOW": "4"},
            ["SGLANG_MAMBA_MTP_WINDOW=4", "no effect", "'off'", "unset"],
        ),
    ],
)
def test_bad_values_name_option_value_and_remedy(environ, words):
    with pytest.raises(MtpError) as caught:
        MtpConfig.from_env(environ)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_every_option_does_something():
    used = set().union(*(mode.options for mode in config.MODES.values()))
    assert set(OPTIONS) == {"mode"} | used


def test_help_names_every_mode_and_variable():
    parser = argparse.ArgumentParser()
    config.add_flags(parser)
    text = parser.format_help()
    for option in OPTIONS.values():
        assert option.flag in text and option.env in text
    for name in config.MODES:
        assert name in text
    assert f"Default: {config.DEFAULT_MODE}" in " ".join(text.split())


@pytest.mark.parametrize("flag", [option.flag for option in OPTIONS.values()])
def test_an_empty_flag_is_a_wrong_one(flag):
    with pytest.raises(MtpError, match=f"{flag} '': expected .*; give a value or leave the flag out"):
        config.take_flags(parse(flag, ""), {})
    assert MtpConfig.from_env({option.env: " " for option in OPTIONS.values()}) == MtpConfig()


@pytest.mark.parametrize(
    "argv, environ, words",
    [
        ("", {}, "--mamba-mtp-mode off (SGLANG_MAMBA_MTP_MODE=off)"),
        ("--mamba-mtp-window 9", {}, "--mamba-mtp-mode off (SGLANG_MAMBA_MTP_MODE=off), without --mamba-mtp-window 9"),
        (
            "--mamba-mtp-radix rewind",
            {"SGLANG_MAMBA_MTP_WINDOW": "9"},
            "--mamba-mtp-mode off (SGLANG_MAMBA_MTP_MODE=off), "
            "without SGLANG_MAMBA_MTP_WINDOW=9 and --mamba-mtp-radix rewind",
        ),
    ],
)
def test_what_to_choose_instead(argv, environ, words):
    assert config.take_flags(parse(*argv.split()), environ).instead("off") == words


def test_what_an_engine_is_to_choose_instead(monkeypatch):
    for name in [*(option.env for option in OPTIONS.values()), config.SPELLINGS]:
        monkeypatch.setenv(name, "")
    asked = config.take_keywords({"mamba_mtp_window": 9})
    assert asked.instead("off") == "mamba_mtp_mode='off', without mamba_mtp_window=9"


def test_flags_win_before_sglang_parses_them():
    environ = {"SGLANG_MAMBA_MTP_MODE": "fast", "SGLANG_MAMBA_MTP_WINDOW": "many"}
    wrong = dict(environ)
    assert config.to_come(["--mamba-mtp-mode", "replay", "--mamba-mtp-window", "4"], environ).window == 4
    with pytest.raises(MtpError, match="SGLANG_MAMBA_MTP_WINDOW=many"):
        config.to_come(["--mamba-mtp-mode", "replay"], environ)
    environ = {"SGLANG_MAMBA_MTP_MODE": "slots", "SGLANG_MAMBA_MTP_WINDOW": "8"}
    assert config.to_come(["--mamba-mtp-mode", "replay"], environ).window == 8
    assert config.to_come(["--mamba-mtp-mode"], {}) == MtpConfig()  # SGLang's parser will say what is missing
    assert wrong == {"SGLANG_MAMBA_MTP_MODE": "fast", "SGLANG_MAMBA_MTP_WINDOW": "many"}  # nothing was exported


@pytest.mark.parametrize(
    "argv, environ, mode",
    [
        ("--model-path x --mamba-mtp-mode off", {}, "off"),
        ("--mamba-mtp-mode=off --tp 2", {"SGLANG_MAMBA_MTP_MODE": "slots"}, "off"),
        ("--model-path x", {"SGLANG_MAMBA_MTP_MODE": " off"}, "off"),
        ("--mamba-mtp-mode slots", {"SGLANG_MAMBA_MTP_MODE": "off"}, "slots"),
        ("--mamba-mtp-mode", {}, None),
        ("serve --m off --mode off -h", {}, None),
        ("", {}, None),
    ],
)
def test_the_mode_is_known_before_sglang_parses_its_flags(argv, environ, mode):
    assert config.mode_asked_for(argv.split(), environ) == mode


def test_options_of_modes_exist():
    for mode in config.MODES.values():
        assert mode.options <= set(OPTIONS)
