"""The record: taken up again under the same conditions, refused under others, whole at any time."""

from __future__ import annotations

import json

import pytest
from mtp_bench import record
from mtp_bench.plan import plan
from mtp_bench.record import Record, RecordError
from mtp_demo import machine


def finished(options, **figures):
    made = Record(options)
    (serving, *_) = plan(options)[0]
    number = made.add_server(serving, start_seconds=3.0)
    made.add_load(serving, options.loads[0], number, seconds=1.0, bench_serving=figures, server_log={})
    return made


def test_what_is_finished_is_taken_up(parse):
    options = parse()
    finished(options).end("time limit")
    again = Record(options)
    first, second = plan(options)[0][:2]
    assert again.has(first, options.loads[0])
    assert not again.has(first, options.loads[1])
    assert not again.has(second, options.loads[0])
    assert len(again.content["commands"]) == 2
    more = Record(parse("--modes", "replay"))
    assert more.has(first, options.loads[0])
    assert list(more.content["modes"]) == ["none", "stock", "replayssm", "slots", "replay", "rewind"]


def test_a_load_of_other_length_is_another_load(parse):
    finished(parse("--concurrency", "4"))
    longer = parse("--concurrency", "4", "--rounds", "2")
    assert not Record(longer).has(plan(longer)[0][0], longer.loads[0])


def test_conversations_are_entries_of_their_own(parse):
    options = parse("--concurrency", "4", "--conversations", "4")
    made = finished(options)
    (serving, *_), talks = plan(options)[0], options.loads[1]
    assert not made.has(serving, talks)
    made.add_load(serving, talks, 0, seconds=2.5, answers={})
    again = Record(options)
    assert again.has(serving, talks) and again.has(serving, options.loads[0])
    assert again.seconds(talks) == [2.5]
    for other in (("--turns", "3"), ("--turn-len", "9")):
        assert not again.has(serving, parse("--conversations", "4", *other).loads[0])
    assert [entry["load"] for entry in again.content["loads"]] == ["4 requests"]
    (entry,) = again.content["conversations"]
    assert (entry["load"], entry["turns"], entry["server"]) == ("4 conversations of 2 turns", 2, 0)


def test_a_record_from_before_conversations_is_taken_up(parse):
    options = parse("--concurrency", "4")
    made = finished(options)
    del made.content["conversations"]
    made.write()
    again = Record(options)
    assert again.content["conversations"] == []
    assert again.has(plan(options)[0][0], options.loads[0])


def test_other_conditions_are_refused_and_told(parse, monkeypatch):
    finished(parse("--concurrency", "4"))
    with pytest.raises(RecordError, match=r"settings\.output_len: 16 there, 32 now"):
        Record(parse("--concurrency", "4", "--output-len", "32"))
    monkeypatch.setenv(machine.COMMIT, "other")
    with pytest.raises(RecordError, match=r"commit: .* there, 'other' now"):
        Record(parse("--concurrency", "4"))
    assert Record(parse("--concurrency", "4", "--fresh")).content["loads"] == []


def test_what_is_no_record_is_not_overwritten(parse):
    options = parse()
    options.out.write_text("[]")
    with pytest.raises(RecordError, match="is no record"):
        Record(options)
    assert options.out.read_text() == "[]"


def test_a_record_says_interrupted_until_it_is_told_otherwise(parse):
    options = parse()
    made = finished(options)
    assert json.loads(options.out.read_text())["ended"] == "interrupted"
    made.fail("broke")
    made.end("failed")
    content = json.loads(options.out.read_text())
    assert (content["ended"], content["errors"]) == ("failed", ["broke"])
    assert Record(options).content["errors"] == []
    assert not list(options.out.parent.glob("*.new"))


def test_conditions_name_versions_commit_and_machine(parse, monkeypatch):
    monkeypatch.setenv(machine.COMMIT, "abc")
    found = record.conditions(parse("--accept", "2"))
    assert found["commit"] == "abc"
    assert found["versions"]["sglang"]
    assert found["device"]["kind"] == "cpu"
    assert found["settings"]["simulated_accept_length"] == 2
