"""Requests above temperature 0: what is drawn, drafts among it, is what SGLang's verify draws, and so are its states.

On a CPU a verify draws by `sglang_mamba_mtp.cpu.sampling_ops`, on a GPU by SGLang's kernel (test_gpu_features.py).
"""

from __future__ import annotations

import dataclasses

import pytest

from . import draft_models, logprobs, scenarios
from .harness import compare_states, plain_spec, run
from .matrix import IN_FULL, Case, in_families
from .sampling import drawn_otherwise, told_otherwise
from .scenario import Request, Scenario

CELL = {"gdn": ("nextn-chain", "no_buffer"), "mamba2": ("nextn-tree", "extra_buffer-overlap")}


@pytest.mark.parametrize(("family", "mode"), in_families(IN_FULL, quick={("gdn", "slots"), ("mamba2", "replay")}))
def test_what_is_drawn_is_what_sglangs_verify_draws(family, mode, checkpoint):
    """With seeds of the requests' own: the same tokens, as likely as there, and the states of these."""
    vocab = checkpoint.vocab
    todo = [scenarios.drawn(vocab), scenarios.drawn_for_long(vocab, 60)]
    ours = Case(family, *CELL[family], mode).spec(checkpoint(family), seeded=True)
    result, stock = run(ours, todo), run(dataclasses.replace(ours, mode="off"), todo)
    assert result.accept_length > 1.05 and result.cached_tokens > 0
    assert drawn_otherwise(result, stock) == []
    assert told_otherwise(result, stock) < logprobs.BOUND
    compare_states(result).check()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["nextn-chain", "dflash-chain"])
def test_a_verify_draws(algorithm, checkpoint, tmp_path):
    """Or the test above would say nothing of temperatures."""
    drafts = {"draft_model": str(draft_models.write_dflash(tmp_path / "draft"))} if algorithm == "dflash-chain" else {}
    spec = Case("gdn", algorithm, "no_buffer", "replay").spec(checkpoint("gdn"), **drafts)
    warm = run(spec, [scenarios.drawn(checkpoint.vocab)])
    compare_states(warm).check()
    greedy = run(plain_spec(spec), _continued(warm))
    said = {key: outcome.tokens[1:] for key, outcome in warm.outcomes.items()}
    likeliest = {key: greedy.outcomes[f"rest/{key.partition('/')[2]}"].tokens for key in said}
    assert warm.outcomes["drawn/a1"].tokens[0] != warm.outcomes["drawn/cold"].tokens[0], "a prefill drew nothing"
    assert said["drawn/cold"] == likeliest["drawn/cold"]
    assert all(said[key] != likeliest[key] for key in said if key != "drawn/cold")


def _continued(result) -> list[Scenario]:
    """What a greedy engine says after each request's first token."""
    requests = (
        Request(key.partition("/")[2], (*outcome.prompt, outcome.tokens[0]), len(outcome.tokens) - 1)
        for key, outcome in result.outcomes.items()
    )
    return [Scenario("rest", tuple(requests))]


@pytest.mark.slow
def test_with_seeds_draws_hang_on_the_request_alone(checkpoint):
    """In whatever batches, and whoever verifies: what the comparisons with SGLang's verify rest on."""
    ours = Case("gdn", *CELL["gdn"], "replay").spec(checkpoint("gdn"), seeded=True)
    others = dataclasses.replace(ours, mode="off", max_running_requests=2, chunked_prefill_size=128)
    unseeded = dataclasses.replace(ours, seeded=False)
    first, again, otherwise = (run(spec, [scenarios.drawn(checkpoint.vocab)]) for spec in (ours, others, unseeded))
    assert drawn_otherwise(first, again) == []
    assert "drawn/a1" in drawn_otherwise(first, otherwise), "nothing was drawn"


@pytest.mark.slow
def test_two_ranks_draw_what_one_draws(checkpoint):
    """With seeds: the first rank's draws are everybody's."""
    ours = Case("mamba2", *CELL["mamba2"], "replay").spec(checkpoint("mamba2"), seeded=True)
    one, two = (run(dataclasses.replace(ours, ranks=ranks), [scenarios.drawn(checkpoint.vocab)]) for ranks in (1, 2))
    assert drawn_otherwise(one, two) == []
