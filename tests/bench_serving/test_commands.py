"""What is run: a server's flags and environment are the same for every mode but its own, the client's are those of the
installed bench_serving."""

from __future__ import annotations

import argparse
import itertools

import pytest
from mtp_bench import client, server
from mtp_bench.options import parse as parse_flags
from mtp_bench.plan import plan


def servings(options):
    return {serving.name: serving for serving in plan(options)[0]}


def test_equal_flags_for_every_mode(parse):
    options = parse("--server-args", "--page-size 1", "--device", "cuda")
    lines = {name: server.arguments(options, serving, "m") for name, serving in servings(options).items()}
    common = lines["none"][: lines["none"].index("--mamba-mtp-mode")]
    assert common[-2:] == ["--page-size", "1"]
    assert all(line[: len(common)] == common for line in lines.values())
    drafts = lines["stock/chain4"][len(common) : lines["stock/chain4"].index("--mamba-mtp-mode")]
    assert drafts[:2] == ["--speculative-algorithm", "NEXTN"]
    own = {name: line[len(common) + (0 if name == "none" else len(drafts)) :] for name, line in lines.items()}
    assert own == {
        "none": ["--mamba-mtp-mode", "off"],
        "stock/chain4": ["--mamba-mtp-mode", "off"],
        "replayssm/chain4": ["--mamba-mtp-mode", "off", "--enable-linear-replayssm-spec"],
        "slots/chain4": ["--mamba-mtp-mode", "slots"],
        "replay/chain4": ["--mamba-mtp-mode", "replay", "--mamba-mtp-radix", "sglang"],
        "rewind/chain4": ["--mamba-mtp-mode", "replay", "--mamba-mtp-radix", "rewind"],
    }


def test_equal_memory_on_a_gpu(tmp_path):
    flags = ["--shape", "qwen3-next-80b", "--device", "cuda", "--tp", "2", "--out", str(tmp_path / "r.json")]
    options = parse_flags(flags)
    line = server.arguments(options, servings(options)["replay/chain4"], "m")
    for flag, value in {
        "--mem-fraction-static": "0.85",
        "--max-running-requests": "256",
        "--cuda-graph-max-bs-decode": "256",
        "--tp-size": "2",
        "--load-format": "dummy",
        "--tokenizer-path": "m/tokenizer",
    }.items():
        assert line[line.index(flag) + 1] == value
    assert "--dtype" not in line
    options = parse_flags([*flags, "--max-total-tokens", "4096"])
    assert "--mem-fraction-static" not in server.arguments(options, servings(options)["none"], "m")


def test_a_server_listens_on_this_machine_alone(parse, tmp_path, monkeypatch):
    """SGLang's helper starts it; the command as it would be run, in which the last --host counts."""
    from tests.engine.harness import import_sglang

    import_sglang()
    from sglang.test import test_utils

    started = []

    def launch(command, *arguments):
        started.append(command)
        raise OSError("seen")

    monkeypatch.setattr(test_utils, "_launch_server_process", launch)
    options = parse("--server-args", "--host 0.0.0.0")
    for serving in servings(options).values():
        with pytest.raises(server.ServerError, match="seen"):
            server.Server(options, serving, "m", tmp_path / f"{len(started)}.log").start()
    assert len(started) == len(servings(options))
    for command in started:
        hosts = [value for flag, value in itertools.pairwise(command) if flag == "--host"]
        assert hosts == ["0.0.0.0", "127.0.0.1"]


def test_sglang_listens_on_this_machine_unless_told():
    """For the launch lines of README and of advise, which name no host."""
    from tests.engine.harness import import_sglang

    import_sglang()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    assert parser.get_default("host") == "127.0.0.1"


def test_a_servers_environment(tmp_path, parse):
    options = parse_flags(["--shape", "qwen3-next-80b", "--device", "cuda", "--out", str(tmp_path / "r.json")])
    found = servings(options)
    assert server.environment(options, found["replay/chain4"])["SGLANG_SIMULATE_ACC_LEN"] == "3.0"
    assert server.environment(options, found["none"])["SGLANG_SIMULATE_UNIFORM_EXPERTS"] == "1"
    assert "SGLANG_SIMULATE_ACC_LEN" not in server.environment(options, found["none"])
    on_a_cpu = parse("--shape", "qwen3-next-80b")
    assert "SGLANG_SIMULATE_UNIFORM_EXPERTS" not in server.environment(on_a_cpu, servings(on_a_cpu)["none"])
    checkpoint = parse()
    variables = server.environment(checkpoint, servings(checkpoint)["replay/chain4"])
    assert not [name for name in variables if "SIMULATE" in name]
    # SGLang's helper starts a server that failed a second time, without this, where the value is 1.
    assert variables["HF_HUB_OFFLINE"] == "TRUE"


def test_the_simulation_is_sglangs(parse):
    """The names are read, not invented, and acceptance of 3 means two drafts and the target's own token."""
    from tests.engine.harness import import_sglang

    import_sglang()
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.speculative.spec_utils import generate_simulated_accept_index

    assert envs.SGLANG_SIMULATE_UNIFORM_EXPERTS.get() is False
    assert envs.SGLANG_SIMULATE_ACC_LEN.get() == -1
    drafts = torch.zeros(2, dtype=torch.int32)
    accepted = generate_simulated_accept_index(
        accept_index=torch.tensor([[0, -1, -1, -1], [4, -1, -1, -1]], dtype=torch.int32),
        predict=torch.zeros(8, dtype=torch.int32),
        num_correct_drafts=drafts,
        candidates=None,
        target_predict=None,
        bs=2,
        spec_steps=3,
        simulate_acc_len=3.0,
    )
    assert accepted.tolist() == [[0, 1, 2, -1], [4, 5, 6, -1]]
    assert drafts.tolist() == [2, 2]


def test_the_clients_flags(parse, tmp_path):
    options = parse("--client-args", "--temperature 0.5")
    line = client.arguments(options, options.loads[1], url="http://h:1", model="m", output=tmp_path / "o")
    for flag, value in {
        "--max-concurrency": "4",
        "--num-prompts": "4",
        "--warmup-requests": "4",
        "--random-input-len": "32",
        "--random-output-len": "16",
        "--tokenizer": "m",
        "--temperature": "0.5",
    }.items():
        assert line[line.index(flag) + 1] == value
    assert "--request-rate" not in line
    (load,) = parse("--request-rate", "2", "--rate-seconds", "3").loads
    line = client.arguments(options, load, url="http://h:1", model="m", output=tmp_path / "o")
    assert line[line.index("--request-rate") + 1] == "2.0"
    assert line[line.index("--warmup-requests") + 1] == "6"
    assert "--max-concurrency" not in line


def test_a_flush_is_asked_for_until_the_server_is_idle():
    asked = []

    def flush(url):
        asked.append(url)
        if len(asked) < 3:
            raise OSError("busy")

    client.patient(flush)("u")
    assert asked == ["u"] * 3
    with pytest.raises(ZeroDivisionError):
        client.patient(lambda: 1 / 0, seconds=0)()


def test_an_answer_that_is_missing_is_a_failure():
    with pytest.raises(client.ClientError, match="3 of 4 requests"):
        client.kept({"completed": 3}, 4)
    assert client.kept({"completed": 4, "median_itl_ms": 1.5}, 4)["median_itl_ms"] == 1.5
