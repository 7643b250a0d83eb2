"""What a window of too many tokens is answered with."""

from __future__ import annotations

import pytest
import torch
from triton.runtime.errors import OutOfResources

from sglang_mamba_mtp.errors import MtpError
from sglang_mamba_mtp.state.store import VerifyBatch


@pytest.mark.parametrize("family", ["gdn", "mamba2"])
def test_a_window_that_does_not_fit_the_gpu_names_the_flags(sglang, family):
    from tests.stateful import naive, test_lives

    store = test_lives.replay_pool(naive.MODELS[family](naive.Sizes(), torch.Generator().manual_seed(0)), 8, "vk").store

    def verify(**where):
        raise OutOfResources(167936, 101376, "shared memory")

    store._verify = verify
    with pytest.raises(
        MtpError, match=r"^a verify of 4 nodes over a window of 8 tokens needs 167936 of a GPU's shared"
    ) as told:
        store.score(0, VerifyBatch.padding(1, 4, store.states.device))
    assert "has 101376: choose a smaller --mamba-mtp-window, or fewer --speculative-num-draft-tokens" in str(told.value)
