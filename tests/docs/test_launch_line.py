"""README's launch line: it is understood everywhere, and on a GPU it serves and begins as README says."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

import psutil
import pytest
from mtp_demo.server import Server

from ..processes import clean_environment, sglang  # noqa: F401 - fixtures, and the environment before SGLang

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
LAUNCH = README.partition("## Install and launch")[2].partition("\n## ")[0]
COMMAND, LOG = re.findall(r"```\n(.*?)```", LAUNCH, re.DOTALL)[:2]


def launch_line() -> list[str]:
    """The program and its flags."""
    line = COMMAND.replace("\\\n", " ").strip().splitlines()[-1]
    python, *rest = shlex.split(line)
    assert (python, rest[:2]) == ("python", ["-m", "sglang.launch_server"])
    return [sys.executable, *rest]


def begins() -> str:
    """A pattern of the line that README shows: every number may be another."""
    return re.sub(r"\d+(\\\.\d+)*", r"[\\d.]+", re.escape(LOG.strip()))


def test_every_flag_is_known(sglang):  # noqa: F811
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert parser.parse_args(launch_line()[3:]).speculative_num_draft_tokens == 4
    assert re.fullmatch(begins(), LOG.strip())
    assert not re.fullmatch(begins(), LOG.strip().replace("replay", "slots"))


@pytest.mark.gpu
def test_it_serves_and_ends(tmp_path):
    """One line of the plugin's, an answer, and nothing left after it is stopped."""
    server = Server(launch_line(), device="cuda", log=tmp_path / "log")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    try:
        server.start(timeout=400)
        sampling = {"max_new_tokens": 16, "temperature": 0}
        answer = server.post("/generate", {"text": "Tom has 3 apples.", "sampling_params": sampling})
        started = {child.pid for child in psutil.Process().children(recursive=True)} - before
    finally:
        server.stop()
    told = [line.partition("mamba-mtp")[2] for line in server.log.read_text().splitlines() if "mamba-mtp" in line]
    print(*told, answer["text"], sep="\n    ")
    assert len(told) == 1 and re.search(begins(), f"mamba-mtp{told[0]}")
    assert answer["meta_info"]["completion_tokens"] > 0 and len(started) > 1
    assert not [pid for pid in started if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
