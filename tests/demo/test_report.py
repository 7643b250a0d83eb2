"""The verdict, the table, the JSON and the exit status."""

from __future__ import annotations

import json

import main
import pytest
from mtp_demo import options, report
from mtp_demo import run as demo_run
from mtp_demo.compare import Difference, Verdict
from mtp_demo.interrupt import Interrupted
from mtp_demo.run import find_failures
from mtp_demo.server import ServerError

from .builders import answer, outcome, run

PLAIN = run(answer((1, 2, 3)), answer((4, 5, 6)))
GOOD = run(answer((1, 2, 3), verify_steps=1), answer((4, 5, 6), verify_steps=1))
TIE = Verdict(Difference(1, 2, 6, 7), True, 0.1, "the top two are 0.100 nats apart")
WRONG = Verdict(Difference(1, 2, 6, 7), False, None, "outputs must be equal token for token")


@pytest.fixture
def parsed(model):
    return options.parse(["--model", str(model), "--device", "cpu"])


def test_good_runs_have_no_failures(parsed):
    assert find_failures(parsed, PLAIN, GOOD, ()) == ()


def test_a_tie_is_no_failure(parsed):
    assert find_failures(parsed, PLAIN, GOOD, (TIE,)) == ()


def test_a_differing_request_is_a_failure(parsed):
    (failure,) = find_failures(parsed, PLAIN, GOOD, (WRONG,))
    assert failure.startswith("request 1 differs at token 2")


def test_low_accuracy_is_a_failure_in_either_run(parsed):
    low = run(answer(), accuracy=0.85)
    assert "without speculation is 0.850" in find_failures(parsed, low, GOOD, ())[0]
    low = run(answer(verify_steps=1), accuracy=0.85)
    assert "with speculation is 0.850" in find_failures(parsed, PLAIN, low, ())[0]


def test_speculation_that_never_happened_is_a_failure(parsed):
    assert find_failures(parsed, PLAIN, PLAIN, ()) == ("the server with speculation verified no drafts",)


def test_the_table_shows_every_figure(parsed):
    text = report.table(parsed, outcome(PLAIN, GOOD, verdicts=[WRONG]))
    for figure in ("1.000", "accept length", "2.00", "tokens/s", "1 of 2, 1 WRONG", "9,000 B", "1,000 B", "160 of 200"):
        assert figure in text, figure
    rows = [line for line in text.splitlines() if line.startswith(("accuracy", "accept", "tokens/s", "server"))]
    assert len({len(row) for row in rows}) == 1, "columns are not aligned"


def test_ties_are_counted_where_they_may_be(model):
    parsed = options.parse(["--model", str(model), "--device", "cuda"])
    assert report.identical_text(parsed, outcome(PLAIN, GOOD, verdicts=[TIE])) == "1 of 2, 1 at ties (gap <= 0.25 nats)"


def test_the_json_says_what_was_run(parsed):
    content = report.document(parsed, [outcome(PLAIN, GOOD)], argv=["--device", "cpu"])
    content = json.loads(json.dumps(content))
    assert content["passed"] is True
    assert content["versions"]["python"]
    assert content["device"]["kind"] == "cpu"
    assert content["settings"]["speculation"]["flags"][1] == "NEXTN"
    assert content["settings"]["seed"] == 0
    (model,) = content["models"]
    assert (model["identical"], model["ties"], model["requests"]) == (2, 0, 2)
    speculative = model["with_speculation"]
    assert (speculative["accept_length"], speculative["accept_length_of_sglang"]) == (2.0, 3.0)
    assert speculative["speculative_state_bytes"]["total"] == 9000
    assert speculative["cached_prompt_tokens"] == 160
    assert speculative["output_sha256"] == model["without_speculation"]["output_sha256"]


def test_the_json_of_a_failure(parsed):
    bad = outcome(PLAIN, GOOD, verdicts=[WRONG], failures=["request 1 differs"])
    assert report.document(parsed, [bad], argv=[])["passed"] is False
    (difference,) = report.document(parsed, [bad], argv=[])["models"][0]["differences"]
    assert difference["position"] == 2 and not difference["tie"]
    assert report.document(parsed, [], argv=[])["passed"] is False
    assert report.document(parsed, [outcome(PLAIN, GOOD)], argv=[], errors=["died"])["passed"] is False


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (outcome(PLAIN, GOOD), main.PASSED),
        (outcome(PLAIN, GOOD, verdicts=[WRONG], failures=["request 1 differs"]), main.FAILED),
        (ServerError("the server ended with status 1\n--- the end of log [x]"), main.SERVER_FAILED),
        (Interrupted(2), 130),
        (Interrupted(15), 143),
    ],
)
def test_the_exit_status(model, tmp_path, monkeypatch, result, status):
    class Fake:
        def __init__(self, *arguments):
            pass

        def __call__(self):
            if isinstance(result, BaseException):
                raise result
            return result

    monkeypatch.setattr(demo_run, "ModelRun", Fake)
    monkeypatch.setattr(main.interrupt, "catch", lambda: None)
    path = tmp_path / "r.json"
    arguments = ["--model", str(model), "--device", "cpu", "--json", str(path), "--logs", str(tmp_path / "logs")]
    assert main.main(arguments) == status
    content = json.loads(path.read_text())
    assert content["passed"] is (status == main.PASSED)
    assert content["interrupted"] == {130: "SIGINT", 143: "SIGTERM"}.get(status)
    if isinstance(result, BaseException):
        assert str(result) in content["errors"][0]


def test_a_fault_of_the_demo_itself_is_in_the_json(model, tmp_path, monkeypatch):
    def broken(*arguments):
        raise KeyError("meta_info")

    monkeypatch.setattr(demo_run, "ModelRun", broken)
    monkeypatch.setattr(main.interrupt, "catch", lambda: None)
    path = tmp_path / "r.json"
    with pytest.raises(KeyError):
        main.main(["--model", str(model), "--json", str(path), "--logs", str(tmp_path)])
    content = json.loads(path.read_text())
    assert content["errors"] == ["KeyError: 'meta_info'"] and not content["passed"]
