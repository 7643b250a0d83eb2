"""The runner of GPU jobs, with commands that need none."""

from __future__ import annotations

import os
import re
import sys
import tarfile
import time
from types import SimpleNamespace

import on_gpus
import pytest
from on_gpus import JOBS, ROOT, Job, Runner, places

pytestmark = pytest.mark.once  # nothing of SGLang is in it


HANGS = """
import time
print("begun, ", end="", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("2 passed", flush=True)
time.sleep(600)
"""

SPAWNS = """
import multiprocessing

def main():
    process = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
    process.start()
    process.join()
    return process.exitcode
"""


def python(code: str, **fields) -> Job:
    return Job((sys.executable, "-c", code), **fields)


def running(*gpus: int, alone: bool = False) -> SimpleNamespace:
    return SimpleNamespace(job=Job((), len(gpus), alone, engines=4), gpus=gpus)


def test_who_may_start_where():
    shares, alone, both, wide = Job(()), Job((), alone=True), Job((), gpus=2), Job((), engines=99)
    assert places(shares, [], 2) == (0,)
    assert places(shares, [running(0)], 2) == (1,), "the least to do"
    assert places(shares, [running(0), running(0), running(1)], 2) == (1,)
    assert places(shares, [running(0, alone=True)], 2) == (1,)
    assert places(shares, [running(0, alone=True)], 1) is None
    assert places(shares, [running(0)] * 5, 1) is None, "no room"
    assert places(wide, [running(0)], 2) == (1,) and places(wide, [running(0)], 1) is None
    assert places(alone, [running(0)], 2) == (1,)
    assert places(alone, [running(0), running(1)], 2) is None
    assert places(both, [running(1, alone=True)], 2) is None
    assert places(both, [running(1)], 2) == (0, 1)


def test_what_ends_is_told_and_what_does_not_is_cut_off(tmp_path, capsys):
    jobs = {
        "good": python("import os; print(os.environ['CUDA_VISIBLE_DEVICES']); print('3 passed in 1 s')"),
        "bad": python("print('FAILED tests/a.py::b'); print('1 failed, 2 passed in 1 s'); raise SystemExit(1)"),
        "hangs": python(HANGS),
        "wide": python("", gpus=2),
        "late": python("", alone=True),
    }
    began = time.time()
    assert not Runner(jobs, ["5"], tmp_path, os.environ).run(until=began + 4)
    assert time.time() - began < 20
    told = (tmp_path / "summary.txt").read_text()
    assert told == capsys.readouterr().out
    assert "good             status 0, " in told and "3 passed in 1 s" in told
    assert "bad              status 1, " in told and "FAILED tests/a.py::b" in told and "1 failed, 2 passed" in told
    assert "hangs            cut off by the time limit\n" in told and "begun, 2 passed" in told
    assert "wide             not run: it needs 2 GPUs, here are 1\n" in told
    assert "late             not begun: the time was up\n" in told
    assert (tmp_path / "good.log").read_text().startswith("5\n")


def test_all_is_well_where_all_ended_well(tmp_path):
    jobs = {"one": python(""), "two": python("", alone=True)}
    assert Runner(jobs, ["5"], tmp_path, os.environ).run(until=time.time() + 60)


def test_examples_name_jobs_that_there_are():
    examples = re.findall(r"^    python tests/bench/on_gpus.py (.*?)(?: {4}.*)?$", on_gpus.__doc__, re.MULTILINE)
    named = [re.sub(r"--\w+( [A-Z0-9/][\w./]*| /\S+)?", "", line).split() for line in examples]
    assert len(examples) == 4 and sum(map(len, named)) > 6
    assert not {name for names in named for name in names} - set(JOBS)


def test_a_job_that_has_too_few_gpus_is_none_that_ended_well(tmp_path):
    assert not Runner({"wide": python("", gpus=2)}, ["5"], tmp_path, os.environ).run(until=time.time() + 60)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_names_files_that_are_there(name):
    paths = [word for word in JOBS[name].command if word.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)


def test_jobs_find_the_plugin_and_a_command_and_leave_their_logs(tmp_path, monkeypatch):
    code = "import shutil, sys, sglang_mamba_mtp as ours; print(ours.__path__, sys.dont_write_bytecode);"
    jobs = {"finds": python(f"{code} print(shutil.which('sglang'))")}
    monkeypatch.setattr(on_gpus, "JOBS", jobs)
    monkeypatch.setattr(on_gpus, "gpus_here", lambda: ["0"])
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    pack = tmp_path / "logs.tar.gz"
    assert on_gpus.main(["--out", str(tmp_path / "logs"), "--pack", str(pack)]) == 0
    with tarfile.open(pack) as archive:
        told = archive.extractfile("logs/finds.log").read().decode()
    assert "sglang_mamba_mtp'] False" in told and told.rstrip().endswith("/sglang")


def test_the_command_may_spawn_processes_as_a_server_does(tmp_path, monkeypatch):
    package = tmp_path / "packages" / "sglang" / "cli"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "main.py").write_text(SPAWNS)
    monkeypatch.setenv("PYTHONPATH", str(package.parents[1]))
    with on_gpus.prepared() as environment:
        assert Runner({"serve": Job(("sglang",))}, ["0"], tmp_path, environment).run(until=time.time() + 60)
    assert "spawned" in (tmp_path / "serve.log").read_text()


def test_jobs_begin_in_the_order_they_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpus, "JOBS", {name: python("", alone=True) for name in ("first", "second", "third")})
    monkeypatch.setattr(on_gpus, "gpus_here", lambda: ["0"])
    assert on_gpus.main(["--out", str(tmp_path), "third", "first", "second"]) == 0
    assert re.findall("first|second|third", (tmp_path / "summary.txt").read_text()) == ["third", "first", "second"]


def test_refusals(capsys):
    for argv, words in ((["nonsense", "--out", "x"], "nonsense: no such job"), ([], "--out: the folder")):
        with pytest.raises(SystemExit) as stop:
            on_gpus.main(argv)
        assert stop.value.code == 2 and words in capsys.readouterr().err
