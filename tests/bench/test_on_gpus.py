"""The runner of GPU jobs, with commands that need none."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import on_gpus
import pytest
from on_gpus import JOBS, ROOT, Job, Runner, places

pytestmark = pytest.mark.once  # nothing of SGLang is in it


def python(code: str, **fields) -> Job:
    return Job((sys.executable, "-c", code), **fields)


def running(*gpus: int, alone: bool = False) -> SimpleNamespace:
    return SimpleNamespace(job=Job((), len(gpus), alone), gpus=gpus)


def test_who_may_start_where():
    shares, alone, both = Job(()), Job((), alone=True), Job((), gpus=2)
    assert places(shares, [], 2, turn=3) == (1,)
    assert places(shares, [running(0, alone=True)], 2, turn=0) == (1,)
    assert places(shares, [running(0), running(1)], 2, turn=0) == (0,)
    assert places(alone, [running(0)], 2, turn=0) == (1,)
    assert places(alone, [running(0), running(1)], 2, turn=0) is None
    assert places(both, [running(1, alone=True)], 2, turn=0) is None
    assert places(both, [running(1)], 2, turn=1) == (0, 1)


def test_what_ends_is_told_and_what_does_not_is_cut_off(tmp_path, capsys):
    jobs = {
        "good": python("import os; print(os.environ['CUDA_VISIBLE_DEVICES']); print('3 passed in 1 s')"),
        "bad": python("print('FAILED tests/a.py::b'); print('1 failed, 2 passed in 1 s'); raise SystemExit(1)"),
        "hangs": python("import time; print('begun', flush=True); time.sleep(600)"),
        "wide": python("", gpus=2),
        "late": python("", alone=True),
    }
    began = time.monotonic()
    assert not Runner(jobs, 1, tmp_path).run(until=began + 4)
    assert time.monotonic() - began < 20
    told = (tmp_path / "summary.txt").read_text()
    assert told == capsys.readouterr().out
    assert "good             status 0, " in told and "3 passed in 1 s" in told
    assert "bad              status 1, " in told and "FAILED tests/a.py::b" in told and "1 failed, 2 passed" in told
    assert "hangs            cut off by the time limit\n" in told and "begun" in told
    assert "wide             not run: it needs 2 GPUs, here are 1\n" in told
    assert "late             not begun: the time was up\n" in told
    assert (tmp_path / "good.log").read_text().startswith("0\n")


def test_all_is_well_where_all_ended_well(tmp_path):
    assert Runner({"one": python(""), "two": python("", alone=True)}, 1, tmp_path).run(until=time.monotonic() + 60)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_names_files_that_are_there(name):
    paths = [word for word in JOBS[name].command if word.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)


def test_refusals(capsys):
    for argv, words in ((["nonsense", "--out", "x"], "nonsense: no such job"), ([], "--out: the folder")):
        with pytest.raises(SystemExit) as stop:
            on_gpus.main(argv)
        assert stop.value.code == 2 and words in capsys.readouterr().err
