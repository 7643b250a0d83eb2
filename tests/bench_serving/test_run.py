"""The loop and its ends, with a stand-in for servers and clients."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from mtp_bench import cli, client, conversations, plot, run
from mtp_bench.generate import Answer
from mtp_bench.loads import Conversations
from mtp_bench.progress import Progress
from mtp_bench.record import Record
from mtp_bench.run import Benchmark, OutOfTime
from mtp_bench.server import ServerError

DECODE = "Decode batch, #running-req: {}, token usage: 0.1, gen throughput (token/s): 50.0, #queue-req: 0\n"


class Stage:
    """Servers and clients that do nothing, and a list of what was done with them."""

    def __init__(self):
        self.done: list[str] = []
        self.broken: dict[str, BaseException] = {}

    def server(self, options, serving, model, log):
        stage = self

        class Server:
            def __init__(self):
                self.serving, self.log, self.url = serving, log, "http://h:1"
                self.command, self.environment, self.start_seconds = ["serve"], {}, 2.0

            def start(self):
                stage.do(f"start {serving.name}")
                log.write_text("max_total_num_tokens=9, max_running_requests=5, available_gpu_mem=1.0 GB\n")

            @contextlib.contextmanager
            def stopped_afterwards(self):
                try:
                    yield self
                finally:
                    stage.done.append(f"stop {serving.name}")

        self.current = log
        return Server()

    def client(self, flags, output, log):
        prompts = int(flags[flags.index("--num-prompts") + 1])
        self.do(f"load {prompts}")
        with self.current.open("a") as file:
            file.write(DECODE.format(prompts))
        return {name: 1.0 for name in client.KEPT} | {"completed": prompts}

    def talk(self, options, load, *, url, model):
        self.do(f"talk {load.at_once}")
        first, second = Answer([1, 2], 0.5, 4, 0), Answer([3, 4], 0.25, 9, 5)
        return {"answers": conversations.figures([[first, second]] * load.at_once, 2.0)}, "2.0 tokens/s"

    def do(self, what):
        self.done.append(what)
        if what in self.broken:
            raise self.broken.pop(what)


@pytest.fixture
def stage(monkeypatch):
    stage = Stage()
    monkeypatch.setattr(run, "Server", stage.server)
    monkeypatch.setattr(client, "run", stage.client)
    monkeypatch.setitem(run.DRIVERS, Conversations, stage.talk)
    monkeypatch.setattr(run, "check_env", dict)
    monkeypatch.setattr(cli, "_prepare", lambda: None)
    monkeypatch.setattr(cli.signal, "signal", lambda *arguments: None)
    return stage


def go(options):
    heard = io.StringIO()
    Benchmark(options, Record(options), Progress(heard))()
    return heard.getvalue()


def flags(parse, *more):
    """The same flags as text, for `cli.main`."""
    options = parse(*more)
    return ["--model-path", options.model, "--device", "cpu", "--quick", "--out", str(options.out), "--no-plots", *more]


def test_each_server_starts_once_for_all_of_its_loads(parse, stage):
    heard = go(parse("--modes", "none,replay"))
    assert stage.done == [
        *("start none", "load 1", "load 4", "stop none"),
        *("start replay/chain4", "load 1", "load 4", "stop replay/chain4"),
    ]
    assert "no speculation (server 1 of 2): starting; about " in heard
    assert "4 requests: 1.0 tokens/s" in heard


def test_the_record_of_a_load(parse, stage):
    options = parse("--modes", "replay", "--concurrency", "4")
    go(options)
    content = json.loads(options.out.read_text())
    (server,), (load,) = content["servers"], content["loads"]
    assert (server["max_running_requests"], server["start_seconds"]) == (5, 2.0)
    assert (load["serving"], load["concurrency"], load["server"]) == ("replay/chain4", 4, 0)
    assert load["server_log"]["running_peak"] == 4
    assert load["bench_serving"]["completed"] == 4
    assert "--max-concurrency 4" in load["command"]


def test_only_what_is_missing_is_run(parse, stage):
    go(parse("--modes", "none", "--concurrency", "4", "--max-running-requests", "4"))
    stage.done.clear()
    go(parse("--modes", "none,replay", "--concurrency", "2,4", "--max-running-requests", "4"))
    assert stage.done == [
        *("start none", "load 2", "stop none"),
        *("start replay/chain4", "load 2", "load 4", "stop replay/chain4"),
    ]
    stage.done.clear()
    heard = go(parse("--modes", "none,replay", "--concurrency", "2,4", "--max-running-requests", "4"))
    assert stage.done == []
    assert "4 of 4 loads are in" in heard


def test_conversations_come_after_the_other_loads_and_are_not_run_again(parse, stage, capsys):
    told = flags(parse, "--modes", "none,rewind", "--concurrency", "2", "--conversations", "3")
    assert cli.main(told) == cli.COMPLETE
    assert stage.done == [
        *("start none", "load 2", "talk 3", "stop none"),
        *("start rewind/chain4", "load 2", "talk 3", "stop rewind/chain4"),
    ]
    assert "3 conversations of 2 turns: 2.0 tokens/s, None running" in capsys.readouterr().out
    stage.done.clear()
    assert cli.main(told) == cli.COMPLETE
    assert stage.done == []
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " conversations of 2 turns  " in line]
    assert [row[:1] + row[7:] for row in rows] == [
        ["none", "1", "500/500/500", "4", "0.0", "-", "4.0", "-", "0"],
        ["none", "2", "250/250/250", "9", "5.0", "83.3%", "4.0", "-", "0"],
        ["rewind/chain4", "1", "500/500/500", "4", "0.0", "-", "4.0", "-", "0"],
        ["rewind/chain4", "2", "250/250/250", "9", "5.0", "83.3%", "4.0", "-", "0"],
    ]


def test_conversations_alone_have_no_plots(parse, stage, capsys):
    assert cli.main([flag for flag in flags(parse, "--conversations", "3") if flag != "--no-plots"]) == cli.COMPLETE
    assert plot.draw(parse().out) == []
    assert " of last turn " in capsys.readouterr().out


def test_a_server_that_fails_does_not_stop_the_others(parse, stage, capsys):
    stage.broken["start none"] = ServerError("no memory\nmore")
    stage.broken["load 4"] = client.ClientError("0 of 4 requests were answered")
    arguments = flags(parse, "--modes", "none,stock,replay")
    assert cli.main(arguments) == cli.FAILED
    assert [done for done in stage.done if done.startswith("start")] == [
        *("start none", "start stock/chain4", "start replay/chain4")
    ]
    content = json.loads(parse().out.read_text())
    assert content["ended"] == "failed"
    assert [error.split(":")[0] for error in content["errors"]] == ["none", "stock/chain4"]
    assert len(content["loads"]) == 3
    assert "no memory" in capsys.readouterr().err
    assert cli.main(arguments) == cli.COMPLETE  # the same call again: what failed, and nothing else
    assert json.loads(parse().out.read_text())["ended"] == "complete"
    assert (
        stage.done[-6:]
        == [
            *("start none", "load 1", "load 4", "stop none"),
            *("start stock/chain4", "load 4", "stop stock/chain4"),
        ][-6:]
    )


@pytest.mark.parametrize("moment", ["start none", "load 4"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(143)])
def test_an_interruption_stops_the_server_and_is_recorded(parse, stage, moment, interruption, capsys):
    stage.broken[moment] = interruption
    with pytest.raises(type(interruption)):
        cli.main(flags(parse))
    assert stage.done[-1] == "stop none"
    assert json.loads(parse().out.read_text())["ended"] == "interrupted"
    assert "interrupted: no server is left" in capsys.readouterr().out


def test_nothing_begins_that_would_not_end_in_time(parse, stage):
    with pytest.raises(OutOfTime):
        go(parse("--time-limit", "60"))  # a start was never seen: more is assumed
    assert stage.done == []
    arguments = flags(parse, "--modes", "none", "--time-limit", "60")
    assert cli.main(arguments) == cli.OUT_OF_TIME
    assert json.loads(parse().out.read_text())["ended"] == "time limit"
    go(parse("--modes", "none"))
    assert cli.main(flags(parse, "--modes", "none,replay", "--time-limit", "60")) == cli.COMPLETE


def test_wrong_records_are_wrong_flags(parse, stage, capsys):
    parse().out.write_text("{}")
    assert cli.main(flags(parse)) == cli.WRONG_FLAGS
    assert "is no record" in capsys.readouterr().err


def test_table_and_plots(parse, stage, capsys, tmp_path):
    arguments = flags(parse, "--draft", "chain4,tree8", "--device", "cuda", "--concurrency", "1,4")
    arguments = [flag for flag in arguments if flag != "--no-plots"]
    assert cli.main(arguments) == cli.COMPLETE
    told = capsys.readouterr().out
    assert "replay/tree8" in told and "replayssm/tree8: left out" in told
    assert len([line for line in told.splitlines() if " requests  " in line]) == 2 * 10
    content = json.loads(parse().out.read_text())
    assert list(plot.series(content)) == [
        *("none", "stock/chain4", "stock/tree8", "replayssm/chain4"),
        *("slots/chain4", "slots/tree8", "replay/chain4", "replay/tree8"),
        *("rewind/chain4", "rewind/tree8"),
    ]
    labels = [plot.label(content, loads[0]) for loads in plot.series(content).values()]
    assert labels[:2] == ["no speculation", "SGLang's verify, chain4"]
    for name in ("throughput", "requests"):
        assert (tmp_path / f"r-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_without_loads_has_no_plots(parse):
    options = parse()
    Record(options).write()
    assert plot.draw(options.out) == []


def test_progress_says_what_is_waited_for():
    heard = io.StringIO()
    progress = Progress(heard, every=0.01)
    told = io.StringIO()
    with progress.waiting("starting", lambda: told.write("x") and "making weights"):
        while told.tell() < 2:
            pass
    assert heard.getvalue().splitlines()[0].endswith("] starting")
    assert heard.getvalue().splitlines()[1].endswith("]   making weights")
