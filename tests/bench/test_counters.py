"""counters.py and ncu.py: what ncu is asked, what is read from its CSV, what is said of it. ncu stood in for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import counters
import ncu

pytestmark = pytest.mark.once  # nothing of SGLang is in it

COLUMNS = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size"]
UNITS = {"gpu__time_duration.sum": "nsecond", "dram__bytes_read.sum": "byte"}

QUERY = "Device NVIDIA H200 (GH100)\n-----  -----\n" + "".join(
    f"{metric.split('.')[0]}     Counter     unit     # what it is\n" for metric in ncu.METRICS.values()
)


def csv_of(kernels: list[tuple[str, dict[str, str]]]) -> str:
    """As ncu --csv --page raw writes it: what it says, names, units, a line a kernel; all in quotes."""
    metrics = sorted({metric for _, figures in kernels for metric in figures})
    rows = [[*COLUMNS, *metrics], [*[""] * len(COLUMNS), *(UNITS.get(metric, "%") for metric in metrics)]]
    for number, (kernel, figures) in enumerate(kernels):
        rows.append([str(number), "77", "python3.12", "127.0.0.1", kernel, "1", "7", "(128, 1, 1)"])
        rows[-1] += [figures.get(metric, "n/a") for metric in metrics]
    table = "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)
    return f'==PROF== Connected to process 77\n==PROF== Profiling "x" - 0: 0%....50%....100% - 9 passes\n{table}\n'


def figures(us: str, **more: float | str) -> dict[str, str]:
    given = {"bytes_read": 1e6, "bytes_written": 0, "dram": 10, "l2": 20, "issue": 15, "occupancy": 24, "waves": 3}
    given |= {"programs": 512, "stall_long_scoreboard": 6, "stall_barrier": 3, "stall_selected": 1, **more}
    return {ncu.METRICS[name]: str(value) for name, value in given.items()} | {"gpu__time_duration.sum": us}


EMPTY = (counters.MARK, figures("1,500"))
READ = ("_move_kernel", figures("31,000", dram=90.5))


def test_csv():
    text = csv_of([EMPTY, ("_verify_kernel", figures("59,008", dram="n/a", bytes_read="134,217,728"))])
    empty, verify = ncu.read(text + "==WARNING== something\n")
    assert (empty["kernel"], empty["us"]) == (counters.MARK, 1.5)
    assert (verify["us"], verify["bytes_read"], verify["dram"], verify["registers"]) == (59.008, 134217728, None, None)
    assert ncu.read("==ERROR== none\n") == [] and ncu.errors("==ERROR== none\n==PROF== x\n") == ["==ERROR== none"]


@pytest.mark.parametrize(("unit", "us"), [("ns", 0.25), ("us", 250), ("msecond", 250e3)])
def test_units(unit, us, monkeypatch):
    monkeypatch.setitem(UNITS, "gpu__time_duration.sum", unit)
    monkeypatch.setitem(UNITS, "dram__bytes_read.sum", "Mbyte")
    (kernel,) = ncu.read(csv_of([("k", figures("250", bytes_read=1.5))]))
    assert kernel["us"] == us and kernel["bytes_read"] == 1.5e6


def test_metrics_that_are_not_there_are_not_asked_for():
    without = "".join(line for line in QUERY.splitlines(True) if "pipe_tensor" not in line and "launch" not in line)
    assert {*ncu.METRICS.values()} - {*ncu.known([*ncu.METRICS.values()], without)} == {ncu.METRICS["tensor"]}
    assert ncu.known(["a__b.sum"], "==ERROR== no device") == ["a__b.sum"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"us": 2.0}, "its launch"),
        ({"dram": 80}, "DRAM (80 of 90 %)"),
        ({"issue": 85, "tensor": 20}, "issue (85 %)"),
        ({}, "latency: 24 % of warps, waiting for long_scoreboard 60%, barrier 30%"),
        ({"waves": 0.3, "programs": 128}, "latency: 128 programs, 0.3 waves; 24 % of warps, waiting"),
    ],
)
def test_bounds(more, words):
    (kernel,) = ncu.read(csv_of([("_verify_kernel", figures("60,000"))]))
    assert ncu.bound({**kernel, **more}, dram=90, launch_us=1.5).startswith(words)


def test_regions_and_kernels_that_do_not_fit():
    mark, other = {"kernel": counters.MARK, "us": 1.0}, {"kernel": "k", "us": 9.0}
    regions = [{"part": "head"}, {"part": "layer"}]
    assert counters.pair(regions, [mark, mark, other]) == [{"part": "layer", "launch_us": 1.0, "kernels": [other]}]
    for kernels in ([mark, other], [other, mark, mark], [mark] * 3):
        with pytest.raises(ValueError, match="2 regions"):
            counters.pair(regions, kernels)


ABOUT = {"family": "gdn", "batch": 64}
STEP = {"step": "ours", **ABOUT, "nodes": 4, "kind": "chain", "phase": "no row folds", "folding": 0, "layers": 8}
REGIONS = [
    {"step": "read", **ABOUT, "part": "layer"},
    {"step": "copy", **ABOUT, "part": "layer"},
    *({**STEP, "part": part} for part in ("head", "layer", "commit")),
]
KERNELS = [EMPTY, READ, EMPTY, READ, EMPTY, ("_plan_rows_kernel", figures("2,000")), EMPTY]
KERNELS += [
    (name, figures("60,000", dram=49)) for name in ("_conv1d_verify_kernel", "prepare_kernel", "_verify_kernel")
]
KERNELS += [EMPTY, ("_commit_window_kernel", figures("4,000"))]
TIMES = {
    "environment": {"gpu": "NVIDIA H200"},
    "empty_us": 1.25,
    "steps": [{"family": "gdn", "nodes": 4, "kind": "chain", "batch": 64, "us": 85.0}],
    "floors": [{**ABOUT, "read": 31.0, "copy": 70.0}],
}

STAND_IN = """#!{python}
import subprocess, sys
from pathlib import Path
if "--query-metrics" in sys.argv:
    print({query!r})
elif "--log-file" in sys.argv:
    assert "registers" not in sys.argv[sys.argv.index("--metrics") + 1]
    Path(sys.argv[sys.argv.index("--log-file") + 1]).write_text({log!r})
    at = sys.argv.index({python!r})
    sys.exit(subprocess.run(sys.argv[at:]).returncode)
elif "launch__registers" in sys.argv[sys.argv.index("--metrics") + 1]:
    print("==ERROR== Failed to find metric launch__registers_per_thread")
    sys.exit(1)
"""

CHILD = """
import json, sys
from pathlib import Path
what, cases, out = sys.argv[1:4]
if what == "time":
    Path(out).write_text(json.dumps({times!r}))
if what == "profile":
    Path(out).write_text({regions!r})
    print({said!r})
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """(exit status, the record, what was printed) of the program with these kernels in ncu's log."""

    def run(kernels=KERNELS, said=""):
        child = tmp_path / "child.py"
        regions = "\n".join(map(json.dumps, REGIONS))
        child.write_text(CHILD.format(times=TIMES, regions=regions, said=said))
        monkeypatch.setattr(counters, "child", lambda *rest: [sys.executable, str(child), *rest])
        stand_in = tmp_path / "ncu"
        stand_in.write_text(STAND_IN.format(python=sys.executable, query=QUERY, log=csv_of(kernels)))
        stand_in.chmod(0o755)
        record, status = tmp_path / "record.json", 0
        try:
            counters.main(["--ncu", str(stand_in), "--json", str(record)])
        except SystemExit as exit:
            status = exit.code
        return status, json.loads(record.read_text()) if record.exists() else None, capsys.readouterr().out

    return run


def test_a_run(run, tmp_path, capsys):
    status, record, printed = run()
    assert status == 0 and record["seconds"].keys() == {"compile", "time", "profile"}
    assert [len(region["kernels"]) for region in record["regions"]] == [1, 1, 1, 3, 1]
    verify = record["regions"][3]["kernels"][2]
    assert verify["bound"].startswith("latency: 24 %") and verify["gbps"] == pytest.approx(1e6 / 60 / 1e3)
    lines = printed.splitlines()
    assert sum(line.endswith("no row folds (0 of 64)") for line in lines) == 1
    (longest,) = [line for line in lines if line.startswith("gdn N=4") and "latency" in line]
    assert longest.partition(")")[2].split()[:7] == ["60.0", "49", "15", "24", "latency:", "24", "%"]
    counters.main(["--show", str(tmp_path / "record.json")])
    assert capsys.readouterr().out.strip() in printed
    # three kernels a layer and two a step of 8 layers
    (line,) = [line for line in lines if line.startswith("gdn N=4 chain batch 64  ")]
    assert line.split()[5:] == ["85.0", "3.2", "4.1", "31.0", "70.0", "-"]


def test_a_run_cut_short(run):
    status, record, _ = run(said="no time left for Case(...)")
    assert "no time left" in status and record["regions"]
    status, _, printed = run(kernels=KERNELS[:4])
    assert "5 regions, but 2 marks" in status and not printed
