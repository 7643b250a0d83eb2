"""sanitize.py and sanitizer.py: what is run, what is read from compute-sanitizer's logs, what is said. It is stood in
for, the tests too."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import sanitize
import sanitizer

pytestmark = pytest.mark.once  # nothing of SGLang is in it

ROOT = Path(__file__).parents[2]

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at _verify_kernel+0x1230 in verify_replay.py:210
=========     by thread (0,0,0) in block (1,0,0)
=========     Address 0x7f0000000200 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame:cuLaunchKernelEx [0x1] in libcuda.so.1
=========
========= Target application returned an error
========= ERROR SUMMARY: 7 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at prepare_kernel+0x4a0 in prepare.py:88
=========     and Read access at prepare_kernel+0x520 in prepare.py:91 [512 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 16 bytes
=========     at void at::native::vectorized_elementwise_kernel<(int)4, float>(int, float)+0x110
=========     by thread (3,0,0) in block (0,0,0)
=========
========= Host API uninitialized memory access at access 0x7f0000000400 by cudaMemcpyAsync source
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 2 errors
"""


def test_logs():
    invalid = sanitizer.Finding("Invalid __global__ read of size 4 bytes", "_verify_kernel")
    assert sanitizer.read(MEMCHECK) == ([invalid], 7)
    race = sanitizer.Finding("Error: Race reported between Write access", "prepare_kernel")
    assert sanitizer.read(RACECHECK) == ([race], 1)
    (read, host), total = sanitizer.read(INITCHECK)
    assert read.what.startswith("Uninitialized") and read.kernel not in ("", "_verify_kernel") and total == 2
    assert host == ("Host API uninitialized memory access", "")
    # cut short
    assert sanitizer.read(MEMCHECK.split("=========     by")[0]) == ([invalid], None)


def test_kernels_of_ours():
    ours = sanitizer.our_kernels(ROOT / "kernels")
    assert {"_verify_kernel", "prepare_kernel", "_mamba2_verify_kernel", "_conv1d_verify_kernel"} <= ours
    assert {"_build_tree_kernel", "_commit_window_kernel", "_fold_conv_kernel", "_slots_kernel"} <= ours


def test_initcheck_looks_at_every_kernel():
    assert "--kernel-name-exclude" not in sanitizer.command("initcheck", Path("log"), ["x"])
    assert "--kernel-name-exclude" in sanitizer.command("racecheck", Path("log"), ["x"])
    assert sanitizer.environment("initcheck", graphs=False) and not sanitizer.environment("initcheck", graphs=True)


def test_a_quick_runs_tests_are_there():
    """By name: their parameters are looked for when it starts."""
    for pattern in sanitize.QUICK:
        file, _, test = pattern.partition("::")
        name = re.match(r"test_\w*", test)[0]
        for path in [f"common/test_{kind}.py" for kind in ("move", "turn")] if "|" in file else [file]:
            assert f"def {name}" in (ROOT / "tests" / "kernels" / path).read_text(), pattern


def test_what_is_left_out():
    ids = [f"tests/kernels/{name}" for name in ("gdn/test_a.py::test_x[1-kernel]", "test_grids.py::test_y")]
    ids += [f"tests/kernels/gdn/test_a.py::test_{name}" for name in ("x[1-reference]", "mutations_are_seen", "graph_z")]
    kept = sanitize.wanted(ids, quick=False)
    assert kept == [ids[0], ids[-1]]
    assert sanitize.split([ids[0]] * 3 + [ids[-1]], 2) == [[ids[0]] * 2, [ids[0]], [ids[-1]]]
    with pytest.raises(ValueError, match="no test is"):
        sanitize.wanted(ids, quick=True)
    # a keyword leaves some of a quick run's
    real = "tests/kernels/gdn/test_gpu.py::test_real_sizes[8-chain-torch.float32]"
    assert sanitize.wanted([*ids, real], quick=True, keyword="real_sizes") == [real]
    with pytest.raises(ValueError, match="no test of -k graph is in a quick run"):
        sanitize.wanted(ids, quick=True, keyword="graph")


TESTS = """
import os, time
import pytest
import mamba_mtp_kernels

@pytest.mark.parametrize("n", [1, 2, 3])
def test_right(n): pass
def test_skipped(): pytest.skip("no")
def test_slow():
    for what in ("begins", "ends"):
        with open("times.txt", "a") as file: print(what, file=file)
        time.sleep({slow} if what == "begins" else 0)
def test_graph_replay(): assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
def test_without_cache(): assert os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "1") == "1"
"""

STAND_IN = """#!{python}
import subprocess, sys
from pathlib import Path
log = Path(sys.argv[sys.argv.index("--log-file") + 1])
status = 0 if "-c" in sys.argv else subprocess.run(sys.argv[sys.argv.index({python!r}):]).returncode
log.write_text({log!r})
sys.exit(status)
"""

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """(exit status, table lines by tool, all that was printed) of the program over a few tests, with such logs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(log: str, *arguments: str, slow: float = 0.0):
        programs, tests = tmp_path / "bin", tmp_path / "tests" / "kernels"
        for folder in (programs, tests, tmp_path / "kernels"):
            folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kernels" / "verify.py").write_text("def _verify_kernel(x):\n    pass\n")
        (tests / "test_few.py").write_text(TESTS.format(slow=slow))
        (programs / "compute-sanitizer").write_text(STAND_IN.format(python=sys.executable, log=log))
        (programs / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: one; echo GPU 1: two\n")
        for program in programs.iterdir():
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(programs), prepend=":")
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        monkeypatch.setattr(sanitize, "ROOT", tmp_path)
        with pytest.raises(SystemExit) as exit:
            sanitize.main(["--out", str(tmp_path / "out"), "--workers", "4", "--chunk", "3", *arguments])
        printed = capsys.readouterr().out
        table = {line.split()[0]: line.split()[1:-1] for line in printed.partition("tool  ")[2].splitlines()[1:]}
        return exit.value.code, table, printed

    return run


def test_clean(run):
    status, table, printed = run(CLEAN, "--tools", "memcheck")
    assert status == 0 and "7 tests in 3 processes, 4 at once on 2 GPUs" in printed
    # processes, passed, skipped, failed, not run, broken, in ours, findings
    assert table["memcheck"] == ["3", "6", "1", "0", "0", "0", "0", "0"]


def test_only_gpus_that_it_may_see(run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    status, _, printed = run(CLEAN, "--tools", "memcheck", "-k", "right")
    assert status == 0 and "on 1 GPUs" in printed


def test_findings(run):
    status, table, printed = run(MEMCHECK, "--tools", "memcheck", "-k", "right")
    assert status == 1 and table["memcheck"] == ["1", "3", "0", "0", "0", "0", "1", "7"]
    assert "memcheck: 1 x Invalid __global__ read of size 4 bytes, in _verify_kernel" in printed


def test_a_process_without_a_summary_is_broken(run):
    status, table, _ = run("", "--tools", "racecheck", "-k", "right")
    assert status == 1 and table["racecheck"][5] == "1"


def test_what_was_not_reached_is_told(run):
    status, table, printed = run(CLEAN, "--tools", "racecheck", "--limit", "3", "-k", "slow", slow=60.0)
    assert status == 2 and table["racecheck"] == ["1", "0", "0", "0", "1", "0", "0", "0"]
    assert "racecheck: tests/kernels/test_few.py::test_slow had not ended" in printed


@pytest.mark.parametrize(("workers", "times"), [("2", "begins begins ends ends"), ("1", "begins ends begins ends")])
def test_tools_together_share_the_processes(run, tmp_path, workers, times):
    arguments = ("--together", "--tools", "memcheck", "racecheck", "--workers", workers, "-k", "slow")
    status, table, _ = run(CLEAN, *arguments, slow=5.0)
    assert status == 0
    assert [table[tool][:2] for tool in ("memcheck", "racecheck")] == [["1", "1"]] * 2
    assert (tmp_path / "times.txt").read_text().split() == times.split()
