"""A real server's metrics, answers and log, and the dashboard that reads them. One start for all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import psutil
import pytest
from mtp_demo.run import DEVICE_FLAGS, attention_backend
from mtp_demo.server import HOST, Server, free_port
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sglang_mamba_mtp import __version__
from sglang_mamba_mtp.metrics.export import COUNTERS, GAUGES, INFO_LABELS, PREFIX

from ..clients import START

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "launch" / "grafana" / "mamba-mtp.json"
DRAFTS = {"--speculative-num-steps": 3, "--speculative-eagle-topk": 1, "--speculative-num-draft-tokens": 4}
WINDOW = 8

DEVICE = "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"


def samples(text: str) -> list[Sample]:
    """``/metrics`` as Prometheus' own parser reads it."""
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def values(text: str) -> dict[str, float]:
    """Value by name; every sample of this server has one of its own."""
    return {sample.name: sample.value for sample in samples(text)}


class Watched:
    """A served tiny model that has answered, with what it then told."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.while_running: list[dict[str, float]] = []
        self._ask()
        self.metrics, self.state = self._at_rest()
        self.samples = values(self.metrics)
        self.told = self.state["mamba_mtp"]
        self.log = server.log.read_text(errors="replace")

    def _at_rest(self) -> tuple[str, dict]:
        """``/metrics`` and the scheduler's state. With overlap a step is still being counted when answers are out, and
        one scrape reads the kinds of metrics one after the other: what the scrape before it told too is at rest."""
        moving = (PREFIX + "verifies_total", PREFIX + "accept_length", "sglang:spec_accept_length")
        metrics = self.text()
        for _ in range(50):
            before, state = values(metrics), self.server.get("/server_info")["internal_states"][0]
            time.sleep(0.1)
            metrics = self.text()
            if all(before.get(name) == values(metrics).get(name) for name in moving):
                break
        return metrics, state

    def _ask(self) -> None:
        tokens = 400 if DEVICE == "cpu" else 4000  # long enough to be scraped meanwhile
        body = {"sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}}
        asked = [
            threading.Thread(
                target=self.server.post,
                args=("/generate", body | {"text": f"Tom has {n} apples and buys {n}.", "rid": f"customer-{n}"}),
            )
            for n in (3, 7)
        ]
        for thread in asked:
            thread.start()
        while any(thread.is_alive() for thread in asked):
            self.while_running.append(values(self.text()))
            asked[0].join(0.05)

    def text(self) -> str:
        """``/metrics``."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{HOST}:{self.server.port}/metrics", timeout=30) as answer:
            return answer.read().decode()

    def __getitem__(self, name: str) -> float:
        return self.samples[PREFIX + name]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    model = ROOT / "launch" / "models" / "tiny-gdn"
    options = ["--model-path", model, *DEVICE_FLAGS[DEVICE], "--speculative-algorithm", "NEXTN"]
    options += ["--dtype", "float32"] if DEVICE == "cpu" else ["--attention-backend", attention_backend(model)]
    options += [item for pair in DRAFTS.items() for item in pair]
    options += ["--mamba-mtp-window", WINDOW, "--enable-metrics", "--decode-log-interval", 1]
    command = [sys.executable, "-m", "sglang.launch_server", *map(str, options)]
    server = Server(command, device=DEVICE, log=tmp_path_factory.mktemp("server") / "log")
    try:
        server.start(timeout=START)
        yield Watched(server)
    finally:
        server.stop()


def test_one_line_says_what_is_served(watched):
    """For people and, behind the bar, for programs; ``/server_info`` tells programs the same."""
    lines = [line for line in watched.log.splitlines() if "mamba-mtp" in line and "speculation seems" not in line]
    assert len(lines) == 1, lines
    human, state = lines[0].split(" | mamba-mtp state: ")
    assert json.loads(state) == watched.told["state"]
    mib = watched.told["state"]["speculative_bytes"] / 2**20
    for words in (
        "mode replay",
        "GDN model",
        f"speculative state {mib:.1f} MiB",
        "state slots",
        "(2 slots each), radix rewind, SGLang",
    ):
        assert words in human


def test_every_metric_is_there(watched):
    wanted = [*GAUGES, *(f"{name}_total" for name in COUNTERS), "info"]
    assert [name for name in wanted if PREFIX + name not in watched.samples] == []


def test_labels_are_the_servers_and_nothing_of_a_request(watched):
    found = samples(watched.metrics)
    (running,) = [sample for sample in found if sample.name.endswith("num_running_reqs")]
    for sample in found:
        if sample.name.startswith(PREFIX):
            own = INFO_LABELS if sample.name == f"{PREFIX}info" else ()
            assert {name: text for name, text in sample.labels.items() if name not in own} == running.labels, (
                sample.name
            )
    (info,) = [sample.labels for sample in found if sample.name == f"{PREFIX}info"]
    assert [info[name] for name in INFO_LABELS] == ["replay", "GDN", __version__]


@pytest.mark.parametrize("words", ["apples", "customer-"])
def test_no_word_of_a_request_is_told(watched, words):
    """Not in the metrics, ``/server_info`` or the log; SGLang's --log-requests is the operator's to give."""
    assert all(words not in told for told in (watched.metrics, json.dumps(watched.state), watched.log))


def test_it_listens_on_this_machine_alone(watched):
    """But for the store of torch.distributed in the scheduler, which takes no address. (On a GPU NCCL listens too.)"""
    server = psutil.Process(watched.server._process.pid)
    listening = {
        (process.pid, connection.laddr.ip, connection.laddr.port)
        for process in (server, *server.children(recursive=True))
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert (server.pid, HOST, watched.server.port) in listening
    elsewhere = [pid for pid, ip, _ in listening if ip not in (HOST, "::1")]
    assert server.pid not in elsewhere
    assert DEVICE == "cuda" or len(elsewhere) == 1


def test_bytes_and_limits_are_the_announced_ones(watched):
    state = watched.told["state"]
    for metric, key in {
        "speculative_bytes": "speculative_bytes",
        "stock_speculative_bytes": "stock_bytes",
        "saved_bytes": "saved_bytes",
        "slot_bytes": "slot_bytes",
        "state_slots": "state_slots",
        "request_limit": "request_limit",
        "memory_request_limit": "memory_limit",
    }.items():
        assert watched[metric] == state[key], metric
    assert state["saved_bytes"] > 0
    assert state["request_limit"] == watched.state["effective_max_running_requests_per_dp"]


def test_accept_length_is_sglangs(watched):
    mean = watched["committed_tokens_total"] / watched["verifies_total"]
    assert mean == pytest.approx(watched.state["avg_spec_accept_length"])
    assert watched["accept_length"] == pytest.approx(watched.samples["sglang:spec_accept_length"])
    assert 1 <= watched["verify_batch"] <= 2
    assert watched["break_even_accept_length"] > 0


def test_pending_tokens_stay_within_their_windows(watched):
    capacity = WINDOW + DRAFTS["--speculative-num-draft-tokens"]
    assert watched["window_tokens"] == capacity
    busy = [sample for sample in watched.while_running if sample.get(PREFIX + "pending_tokens_max", 0) > 0]
    assert busy, "no scrape fell between two steps of the requests"
    whole = 0
    for sample in busy:
        most, all_of_them, occupancy = (
            sample[PREFIX + name] for name in ("pending_tokens_max", "pending_tokens", "window_occupancy")
        )
        assert most <= capacity and all_of_them <= 2 * capacity and occupancy <= 1
        # The gauges are set one after the other, tokens first and occupancy last, and a scrape may fall between two of
        # them. Where those two agree it is of one step.
        if occupancy in (all_of_them / capacity, all_of_them / (2 * capacity)):
            whole += 1
            assert most <= all_of_them <= 2 * most and occupancy > 0
    assert whole > 0, "no scrape is of one step"


def test_folds_account_for_the_tokens_that_were_committed(watched):
    """A fold takes what is more than the window's threshold, but for the newest step; what was folded was committed
    before."""
    told = watched.told
    assert told["folds"] > 0 and told["folds"] >= watched["folds_total"]
    newest = DRAFTS["--speculative-num-draft-tokens"]
    assert told["folds"] * (WINDOW - newest) < told["folded_tokens"] <= told["committed_tokens"]
    assert told["folded_tokens"] <= told["folds"] * told["window_tokens"]
    # what two requests and the warm-up left in their windows was not folded
    assert told["committed_tokens"] - told["folded_tokens"] - told["settled_tokens"] <= 3 * told["window_tokens"]


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_dashboard_shows_what_is_exported(watched):
    """Every name in every expression is a metric of this server, and every metric of ours is on the dashboard."""
    text = " ".join(expressions())
    ours = set(re.findall(rf"\b{PREFIX}\w+", text))
    theirs = set(re.findall(r'__name__=~"([^"]+)"', text))
    assert ours and theirs
    assert [name for name in ours if name not in watched.samples] == []
    for pattern in theirs:  # prometheus_client turns colons into underscores for Prometheus up to version 2
        names = [name for name in watched.samples if re.fullmatch(pattern, name)]
        assert len(names) == 1 and re.fullmatch(pattern, names[0].replace(":", "_")), pattern
    assert {name for name in watched.samples if name.startswith(PREFIX)} == ours


@pytest.fixture
def prometheus(watched, tmp_path):
    """A real Prometheus that scrapes the server every second; returns what evaluates an expression: its samples."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus on PATH")
    port = free_port()
    target = {"job_name": "sglang", "static_configs": [{"targets": [f"{HOST}:{watched.server.port}"]}]}
    (tmp_path / "prometheus.yml").write_text(  # YAML is a superset of JSON
        json.dumps({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [target]})
    )
    command = [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={HOST}:{port}"], stdout=log, stderr=log)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def evaluate(expression: str) -> list[float]:
        asked = urllib.parse.urlencode({"query": expression})
        with opener.open(f"http://{HOST}:{port}/api/v1/query?{asked}", timeout=10) as answer:
            return [float(sample["value"][1]) for sample in json.load(answer)["data"]["result"]]

    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                if evaluate("up") == [1.0]:
                    break
            time.sleep(0.2)
        yield evaluate
    finally:
        process.terminate()
        process.wait()


def test_prometheus_evaluates_the_dashboard(watched, prometheus):
    """Every expression has one line, and a number, while requests run."""
    tokens = 600 if DEVICE == "cpu" else 20000
    body = {"sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}, "text": "Tom has 3"}
    asked = threading.Thread(target=watched.server.post, args=("/generate", body))
    asked.start()
    wanted = {
        expression: re.sub(r"\$(model|instance)", ".*", expression).replace("$__rate_interval", "30s")
        for expression in expressions()
    }
    found: dict[str, list[float]] = {}
    for _ in range(60):
        found = {expression: prometheus(query) for expression, query in wanted.items()}
        if all(len(values) == 1 and values[0] == values[0] for values in found.values()):
            break
        time.sleep(0.5)
    asked.join()
    print(*(f"{', '.join(f'{value:g}' for value in values)}\t{name}" for name, values in found.items()), sep="\n")
    assert {name: values for name, values in found.items() if len(values) != 1 or values[0] != values[0]} == {}


def test_speculation_that_loses_is_told(watched):
    """With a model this small it does: the warning is the only thing more in the log."""
    assert watched["losing_intervals_total"] > 0
    assert watched.log.count("mamba-mtp: speculation seems to cost more than it yields") == 1
