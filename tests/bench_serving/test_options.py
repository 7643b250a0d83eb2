"""Flags: what they mean, and what is refused before anything is set up."""

from __future__ import annotations

import pytest
from mtp_bench import drafts
from mtp_bench.loads import Arrivals, Conversations, Requests
from mtp_bench.plan import plan


def names(options):
    servings, refused = plan(options)
    return [serving.name for serving in servings], refused


def test_all_ways_to_serve_are_compared_by_default(parse):
    ran, refused = names(parse("--device", "cuda"))
    assert ran == ["none", "stock/chain4", "replayssm/chain4", "slots/chain4", "replay/chain4", "rewind/chain4"]
    assert not refused


def test_a_server_without_speculation_runs_once_for_all_drafts(parse):
    ran, refused = names(parse("--modes", "none,replayssm,replay", "--draft", "chain4,tree8", "--device", "cuda"))
    assert ran == ["none", "replayssm/chain4", "replay/chain4", "replay/tree8"]
    assert list(refused) == ["replayssm/tree8"] and "chains only" in refused["replayssm/tree8"]


def test_sglangs_flag_is_left_out_on_a_cpu(parse):
    ran, refused = names(parse())
    assert ran == ["none", "stock/chain4", "slots/chain4", "replay/chain4", "rewind/chain4"]
    assert "needs a GPU" in refused["replayssm/chain4"]


def test_what_needs_no_config_is_known_of_a_model_still_to_be_downloaded(parse):
    _, refused = names(parse("--model-path", "Somebody/A-Model", "--draft", "chain4"))
    assert list(refused) == ["replayssm/chain4"] and "needs a GPU" in refused["replayssm/chain4"]
    ran, refused = names(parse("--model-path", "Somebody/A-Model", "--draft", "chain4,tree8", "--device", "cuda"))
    assert "replayssm/chain4" in ran and list(refused) == ["replayssm/tree8"]


def test_sglangs_flag_is_left_out_where_it_does_nothing(parse, mamba2):
    ran, refused = names(parse("--model-path", str(mamba2)))
    assert "replayssm/chain4" not in ran
    assert "does nothing for this model" in refused["replayssm/chain4"]


@pytest.mark.parametrize(
    ("text", "nodes", "steps", "topk"),
    [("chain4", 4, 3, 1), ("chain2", 2, 1, 1), ("tree4", 4, 2, 2), ("tree8", 8, 3, 4), ("tree16x3", 16, 4, 3)],
)
def test_drafts(text, nodes, steps, topk):
    draft = drafts.parse(text)
    assert (draft.nodes, draft.steps, draft.topk) == (nodes, steps, topk)
    assert draft.chain == (topk == 1)


def test_a_drafts_flags():
    draft = drafts.parse("tree8")
    flags = draft.flags("STANDALONE", "small")
    assert flags[flags.index("--speculative-draft-model-path") + 1] == "small"
    assert flags[flags.index("--speculative-num-steps") + 1] == "3"
    assert flags[flags.index("--speculative-eagle-topk") + 1] == "4"
    assert "--speculative-ngram-max-bfs-breadth" in draft.flags("NGRAM", None)


@pytest.mark.parametrize("text", ["chain", "chain1", "tree1", "tree8x1", "chain4x2", "tree64x2", "star4", ""])
def test_what_is_no_draft(text):
    with pytest.raises(ValueError, match=r".+"):
        drafts.parse(text)


def test_loads(parse):
    options = parse("--concurrency", "2,16", "--rounds", "3", "--request-rate", "0.5", "--rate-seconds", "30")
    assert options.loads == (Requests(2, 6), Requests(16, 48), Arrivals(0.5, 15))
    assert [load.name for load in options.loads] == ["2 requests", "16 requests", "0.5/s"]


def test_conversations(parse):
    (load,) = parse("--conversations", "8").loads
    assert load == Conversations(8, turns=2, turn_len=32)
    flags = ("--concurrency", "4", "--request-rate", "1", "--conversations", "2,8", "--turns", "3", "--turn-len", "5")
    options = parse(*flags)
    assert options.loads[2:] == (Conversations(2, 3, 5), Conversations(8, 3, 5))
    assert [load.name for load in options.loads[2:]] == ["2 conversations of 3 turns", "8 conversations of 3 turns"]
    assert [load.prompts for load in options.loads[2:]] == [6, 24]


def test_every_server_may_run_as_many_requests_as_are_asked_for_at_most(parse):
    assert parse("--concurrency", "2,16").max_running == 16
    assert parse("--request-rate", "2").max_running == 256
    assert parse("--concurrency", "2", "--conversations", "3,5").max_running == 5
    assert parse("--concurrency", "2", "--max-running-requests", "8").max_running == 8


def test_a_shape_simulates_acceptance_and_a_checkpoint_does_not(parse):
    assert parse("--shape", "qwen3-next-80b").accept == 3
    assert parse("--shape", "qwen3-next-80b", "--draft", "chain4,tree8").accept == 2
    assert parse().accept is None


def test_a_shape_may_bring_a_draft_model(parse):
    options = parse("--shape", "granite-4.0-h-small")
    assert options.algorithm == "STANDALONE"
    assert options.draft_model.endswith("granite-4.0-h-small/draft")
    assert parse("--shape", "nemotron-nano-9b-v2").algorithm == "NEXTN"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--modes", "fast"), "'fast' is none of none, stock"),
        (("--modes", ","), "--modes: none given"),
        (("--draft", "chain1"), "at least 2 nodes"),
        (("--concurrency", "0"), "'0' is not a whole number"),
        (("--concurrency", ","), "--concurrency: none given"),
        (("--conversations", "0"), "'0' is not a whole number"),
        (("--turns", "1"), "'1' is not at least 2"),
        (("--turn-len", "x"), "'x' is not a whole number"),
        (("--request-rate", "-1"), "is not a number above 0"),
        (("--mem-fraction-static", "1.5"), "is not between 0 and 1"),
        (("--mem-fraction-static", "0.5", "--max-total-tokens", "9"), "two ways to say the same"),
        (("--accept", "5"), "chain4 accepts at most 4"),
        (("--accept", "0.5"), "at least 1 token"),
        (("--accept", "3", "--draft", "tree8"), "only the first two are sure to be a path"),
        (("--algorithm", "NGRAM"), "drafts trees at any breadth"),
        (("--algorithm", "EAGLE"), "needs --draft-model-path"),
        (("--server-args", "'"), "No closing quotation"),
        (("--shape", "gpt"), "'gpt' is none of granite"),
        (("--shape", "qwen3-next-80b", "--model-path", "x"), "either --shape or --model-path"),
        (("--model-path", "nowhere"), "there is no nowhere"),
        (("--model-path", "/nowhere"), "there is no /nowhere"),
    ],
)
def test_wrong_flags(parse, capsys, flags, message):
    with pytest.raises(SystemExit) as left:
        parse(*flags)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_model_without_an_mtp_layer(parse, mamba2, capsys):
    (mamba2 / "config.json").write_text('{"num_nextn_predict_layers": 0}')
    with pytest.raises(SystemExit):
        parse("--model-path", str(mamba2))
    assert "has no MTP layer" in capsys.readouterr().err
    assert parse("--model-path", str(mamba2), "--modes", "none").loads
