"""Requests above temperature 0: what is drawn, drafts among it, is what SGLang's verify draws, and so are its states.

On a CPU a verify draws by `draws`, on a GPU by SGLang's kernel (test_gpu_features.py).
"""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch

from . import logprobs, scenarios
from .draws import tree_sampling
from .harness import compare_states, run
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
def test_a_verify_draws(checkpoint):
    """Or the test above would say nothing of temperatures."""
    spec = Case("gdn", *CELL["gdn"], "replay").spec(checkpoint("gdn"))
    warm = run(spec, [scenarios.drawn(checkpoint.vocab)])
    greedy = run(dataclasses.replace(spec, mode="off", spec=None, radix=None), _continued(warm))
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


# A root with two drafts, of which the first has one too; the second draft of the root is the likeliest token.
CHILD, SIBLING, DRAFTS = [1, 3, -1, -1], [-1, 2, -1, -1], [0, 4, 1, 2]
PROBABILITIES = [[0.1, 0.5, 0.15, 0.05, 0.2], [0.3, 0.1, 0.4, 0.1, 0.1], [0.2] * 5, [0.0, 0.0, 0.7, 0.3, 0.0]]


@pytest.mark.once
def test_the_stand_in_draws_by_the_targets_probabilities():
    """Whatever the drafts: the first token as after the root, the second as after the first."""
    count, generator = 30_000, torch.Generator().manual_seed(1)
    predicts, accepted = torch.zeros(4 * count, dtype=torch.int32), torch.full((count, 3), -1, dtype=torch.int32)
    lengths = torch.empty(count, dtype=torch.int32)
    tree_sampling(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=lengths,
        candidates=torch.tensor(DRAFTS).expand(count, 4),
        retrive_index=torch.arange(4 * count).view(count, 4),
        retrive_next_token=torch.tensor(CHILD).expand(count, 4),
        retrive_next_sibling=torch.tensor(SIBLING).expand(count, 4),
        uniform_samples=torch.rand(count, 4, generator=generator),
        uniform_samples_for_final_sampling=torch.rand(count, generator=generator),
        target_probs=torch.tensor(PROBABILITIES).expand(count, 4, 5),
        threshold_single=1.0,
        threshold_acc=1.0,
    )
    said: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
    for row, path in enumerate(accepted.tolist()):
        nodes = [node - 4 * row for node in path if node >= 0]
        assert len(nodes) == int(lengths[row]) + 1 and nodes[0] == 0
        tokens = [int(predicts[4 * row + node]) for node in nodes]
        assert tokens[:-1] == [DRAFTS[node] for node in nodes[1:]], "an accepted draft is not what was said"
        for depth, node in enumerate(nodes):
            said[node][tokens[depth]] += 1
    for node, counts in said.items():
        total = sum(counts.values())
        shares = torch.tensor([counts[token] / total for token in range(5)])
        wanted = torch.tensor(PROBABILITIES[node])
        bound = 5 * (wanted * (1 - wanted) / total).sqrt() + 1e-9
        assert bool(((shares - wanted).abs() <= bound).all()), (node, shares, wanted)
    assert sorted(said) == [0, 1, 2, 3], "a path that was never taken"
