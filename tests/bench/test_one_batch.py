"""launch/bench/one_batch.py: who is measured when, what is compared, how it ends. The benchmark stood in for."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "launch" / "bench" / "one_batch.py"


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(PROGRAM.parent))
    spec = importlib.util.spec_from_file_location("one_batch_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def benchmark(program, monkeypatch):
    """Stands in for the processes: [modes run], with ``slower`` the share that replay takes more."""
    ran: list[str] = []

    def set_up(slower: float) -> list[str]:
        def measure(options, mode):
            ran.append(mode)
            factor = 1 + slower if mode == "replay" else 1
            drift = 1 + 0.05 * len(ran)  # the machine gets slower all the while
            times = dict.fromkeys(program.TIMES, 0.01 * factor * drift)
            return [{"batch_size": batch, **times} for batch in options.batches for _ in range(options.repeats)]

        monkeypatch.setattr(program, "measure", measure)
        return ran

    return set_up


def arguments(*more: str) -> list[str]:
    return ["--model-path", "somewhere", "--batches", "1", "16", *more]


def test_modes_take_turns(program):
    assert [mode for mode, _ in program.turns(3)] == ["off", "replay", "replay", "off", "off", "replay"]


@pytest.mark.parametrize("slower, status", [(0.0, 0), (-0.2, 0), (0.03, 1)])
def test_it_ends_with_what_it_found(program, benchmark, capsys, slower, status):
    benchmark(slower)
    assert program.main(arguments("--within", "0.02")) == status
    told = capsys.readouterr().out
    assert told.count("median_decode_latency") == 2 and f"{1 + slower:.4f}" in told  # a drift cancels out


def test_it_goes_on_where_it_stopped(program, benchmark, tmp_path, monkeypatch):
    ran, path = benchmark(0.0), tmp_path / "deep" / "record.json"
    measure, stop = program.measure, iter((False, False, True))

    def stopped(options, mode):
        if next(stop, False):
            raise KeyboardInterrupt
        return measure(options, mode)

    monkeypatch.setattr(program, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        program.main(arguments("--out", str(path)))
    assert ran == ["off", "replay"]
    assert program.main(arguments("--out", str(path))) == 0
    assert ran == ["off", "replay", "replay", "off"]
    record = json.loads(path.read_text())
    assert [len(row["processes"]["off"]) for row in record["rows"]] == [2] * 4
    assert record["settings"]["versions"]["sglang"] and record["commit"]
    with pytest.raises(SystemExit, match="other settings"):
        program.main(arguments("--out", str(path), "--input-len", "9"))


def test_a_benchmark_that_fails_is_told(program, tmp_path):
    """A real process of it: the model is nowhere."""
    with pytest.raises(program.Failed, match=r"(?s)Error: .*mode off: the benchmark ended with status 1"):
        program.measure(program.parse([*arguments(), "--", "--device", "cpu"]), "off")


@pytest.mark.parametrize(
    "wrong, words",
    [
        (["--model-path", "x", "--batches", "0"], "no number above 0"),
        (["--shape", "llama"], "nemotron-nano-9b-v2"),
        (["--model-path", "x", "--output-len", "2"], "from 3 tokens on"),
        ([], "--shape"),
    ],
)
def test_wrong_flags(program, capsys, wrong, words):
    with pytest.raises(SystemExit) as ended:
        program.parse(wrong)
    assert ended.value.code == 2 and words in capsys.readouterr().err


def test_a_shape_needs_no_weights_and_its_flags_go_to_both(program, tmp_path):
    options = program.parse(["--shape", "nemotron-nano-9b-v2", "--repeats", "2", "--", "--tp-size", "2"])
    commands = [program.command(options, mode, tmp_path) for mode in program.MODES]
    for each, mode in zip(commands, program.MODES, strict=True):
        assert each[each.index("--load-format") + 1] == "dummy" and each[each.index("--tp-size") + 1] == "2"
        assert each[each.index("--mamba-mtp-mode") + 1] == mode
    assert commands[0][3:-3] == commands[1][3:-3]
    batches = commands[0][commands[0].index("--batch-size") + 1 :]
    assert batches[:6] == ["1", "1", "16", "16", "64", "64"]
