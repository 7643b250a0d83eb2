"""Drafts of a second model, which drafts on its own (STANDALONE) or reads the target's states (EAGLE3)."""

from __future__ import annotations

import pytest

from . import draft_models, scenarios
from .harness import EngineError, check_equal, run
from .matrix import CACHES, FAMILIES, SECOND_MODEL, Case, in_full
from .scenario import Request, Scenario

READS = {("EAGLE3", "mamba2"): "EAGLE3-last"}
"""SGLang's Mamba2 models hand out no states but their last ones."""

FAST = {
    ("gdn", "eagle3-tree", "no_buffer", "replay"),
    ("mamba2", "standalone-chain", "extra_buffer-overlap", "replay"),
}
"""An engine a family and an algorithm."""


@pytest.fixture(scope="session")
def draft_of(tmp_path_factory):
    """``draft_of(kind)`` is the folder of a draft model, by key of `draft_models.WRITERS`."""
    root = tmp_path_factory.mktemp("drafts")

    def folder(kind: str) -> str:
        if not (root / kind / "config.json").exists():
            draft_models.WRITERS[kind](root / kind)
        return str(root / kind)

    return folder


@pytest.mark.in_turn
@pytest.mark.parametrize("case", in_full(FAMILIES, SECOND_MODEL, CACHES, FAST))
def test_speculation_changes_nothing(case: Case, checkpoint, draft_of):
    kind = SECOND_MODEL[case.algorithm]["spec"]
    todo = [scenarios.turns(checkpoint.vocab)]
    draft = draft_of(READS.get((kind, case.family), kind))
    result = run(case.spec(checkpoint(case.family), draft_model=draft), todo)
    check_equal(result, todo)
    assert result.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "replay"])
def test_sglangs_mamba2_models_show_no_inner_states(mode, checkpoint, draft_of):
    """What stops an EAGLE3 draft that wants them is SGLang's, with and without the plugin."""
    spec = Case("mamba2", "eagle3-chain", "no_buffer", mode).spec(checkpoint("mamba2"), draft_model=draft_of("EAGLE3"))
    with pytest.raises(EngineError, match="set_eagle3_layers_to_capture"):
        run(spec, [Scenario("one", (Request("r", (5, 6, 7), 8),))])
