"""What people see while they wait."""

from __future__ import annotations

import io

import pytest
from mtp_demo.progress import Progress
from mtp_demo.stages import FIRST, STAGES, stage

LOG = """\
.../fla/utils.py:223: UserWarning: Triton is not supported on current platform, roll back to CPU.
[2026-11-21 18:57:59] server_args=ServerArgs(model_path='tiny-gdn', tokenizer_path='tiny-gdn', tok
[2026-11-21 18:59:50] Init torch distributed begin.
[2026-11-21 19:00:06] Load weight begin. avail mem=14.85 GB
[2026-11-21 19:00:06] Load weight end. elapsed=0.25 s, type=Qwen3NextForCausalLM, avail mem=14.85 GB
[2026-11-21 19:00:07] KV Cache is allocated. dtype: torch.float32, #tokens: 32768, K size: 0.02 GB
[2026-11-21 19:00:07] Capture target verify CUDA graph begin. backend=full, num_tokens_per_bs=4, avail mem=9.1 GB
[2026-11-21 19:00:08] Load weight begin. avail mem=14.85 GB
[2026-11-21 19:00:09] Application startup complete.
[2026-11-21 19:00:09] Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)
"""


def test_a_log_goes_through_every_stage_in_order_and_never_back():
    lines = LOG.splitlines()
    seen = [stage("\n".join(lines[:count])) for count in range(len(lines) + 1)]
    assert list(dict.fromkeys(seen)) == [FIRST, *(name for _, name in STAGES)]
    assert seen == sorted(seen, key=[FIRST, *(name for _, name in STAGES)].index)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_a_log_file_gets_a_line_a_stage():
    stream = io.StringIO()
    with Progress(stream).waiting("starting") as show:
        for seconds in range(25):
            show(seconds, "importing SGLang" if seconds < 3 else "loading weights")
    assert stream.getvalue().splitlines() == [
        "starting",
        "     0 s  importing SGLang",
        "     3 s  loading weights",
        "    13 s  ...",
        "    23 s  ...",
    ]


def test_a_terminal_gets_one_line_that_goes_away(terminal):
    progress = Progress(terminal)
    with progress.waiting("starting") as show:
        show(1.0, "x" * 200)
    progress.say("done", "good")
    assert "\n" not in terminal.getvalue().split("\033[1;32m")[0]
    assert max(map(len, terminal.getvalue().split("\r\033[K"))) < 60
    assert terminal.getvalue().endswith("\r\033[K\033[1;32mdone\033[0m\n")


def test_the_live_line_goes_away_when_interrupted(terminal):
    with pytest.raises(KeyboardInterrupt), Progress(terminal).counting("asking", 3) as step:
        step()
        raise KeyboardInterrupt
    assert terminal.getvalue().endswith("\r\033[K")


def test_counting_ends_with_all_of_them():
    stream = io.StringIO()
    with Progress(stream).counting("asking", 3) as step:
        for _ in range(3):
            step()
    assert stream.getvalue() == "  asking: 3 of 3\n"


def test_no_colour_where_none_is_wanted(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    Progress(terminal).say("done", "good")
    assert terminal.getvalue() == "\r\033[Kdone\n"
