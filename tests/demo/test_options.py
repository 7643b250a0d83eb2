"""Flags: defaults, the server's command, and clear errors."""

from __future__ import annotations

import pytest
from mtp_demo import options
from mtp_demo.run import server_command


def parse(model, *arguments):
    return options.parse(["--model", str(model), *arguments])


def test_on_a_cpu_outputs_must_be_equal(model):
    parsed = parse(model, "--device", "cpu")
    assert (parsed.dtype, parsed.strict) == ("float32", True)


@pytest.mark.parametrize("arguments", [("--device", "cuda"), ("--device", "cpu", "--dtype", "bfloat16")])
def test_elsewhere_ties_are_looked_at(model, arguments):
    assert not parse(model, *arguments).strict


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (
            (),
            "--speculative-algorithm NEXTN --speculative-num-draft-tokens 4 "
            "--speculative-num-steps 3 --speculative-eagle-topk 1",
        ),
        (
            ("--topk", "2", "--draft-tokens", "6"),
            "--speculative-algorithm NEXTN --speculative-num-draft-tokens 6 "
            "--speculative-num-steps 3 --speculative-eagle-topk 2",
        ),
        (
            ("--algorithm", "NGRAM", "--topk", "4"),
            "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8 --speculative-ngram-max-bfs-breadth 4",
        ),
    ],
)
def test_how_drafts_are_asked_for(model, arguments, flags):
    assert parse(model, *arguments).speculation.flags() == flags.split()


def test_the_servers_differ_by_speculation_alone(model):
    parsed = parse(model, "--device", "cpu", "--mode", "snapshot", "--server-arg=--log-level=debug")
    plain, speculative = (server_command(parsed, model, speculate) for speculate in (False, True))
    assert [flag for flag in speculative if flag not in parsed.speculation.flags()] == plain
    assert plain[plain.index("--mamba-mtp-mode") + 1] == "snapshot"
    assert plain[-1] == "--log-level=debug"


def test_the_default_mode_is_the_plugins(model):
    assert "--mamba-mtp-mode" not in server_command(parse(model), model, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--questions", "0"), "not a whole number of at least 1"),
        (("--questions", "many"), "not a whole number of at least 1"),
        (("--questions", "100000"), "which has"),
        (("--min-accuracy", "90"), "not a number between 0 and 1"),
        (("--draft-tokens", "9"), "a chain of 3 steps has 4"),
        (("--algorithm", "NGRAM", "--draft-tokens", "1"), "at least 2"),
        (("--json", "/no/such/folder/r.json"), "no folder /no/such/folder"),
        (("--mode", "fast"), "invalid choice"),
        (("--verison", "0.5.17"), "unrecognized arguments"),
    ],
)
def test_wrong_flags_are_told(model, arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(model, *arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_model_must_be_one(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(tmp_path)
    assert "has no config.json" in capsys.readouterr().err


def test_nextn_needs_a_head(model, capsys):
    (model / "config.json").write_text('{"num_nextn_predict_layers": 0}')
    with pytest.raises(SystemExit):
        parse(model)
    assert "use --algorithm NGRAM" in capsys.readouterr().err
    assert parse(model, "--algorithm", "NGRAM").models == (model,)
