"""A verify that draws, on a CPU: where a request has a temperature SGLang takes the likeliest tokens there, since its
rejection sampling is a kernel of the GPU's.

With `install` it goes its own way through `eagle_sample` (temperatures, coins, log-probabilities) as on a GPU, to a
PyTorch version of that kernel.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any
from unittest import mock

import torch


def install() -> None:
    """Every batch of this process that is not all greedy is verified by drawing."""
    import sgl_kernel
    from sglang.srt.speculative import eagle_utils, eagle_worker_common, ngram_worker

    original = eagle_utils.eagle_sample

    @functools.wraps(original)
    def eagle_sample(verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        draws = not batch.sampling_info.is_all_greedy
        with mock.patch.object(eagle_utils, "_is_cpu", False) if draws else contextlib.nullcontext():
            return original(verify_input, batch, *args, **kwargs)

    for module in (eagle_utils, eagle_worker_common, ngram_worker):
        module.eagle_sample = eagle_sample
    if hasattr(eagle_utils, "sampling_softmax"):
        eagle_utils.sampling_softmax = softmax
        kernels = eagle_utils
    else:  # an earlier version imports what it needs where it needs it
        kernels = sgl_kernel
        sgl_kernel.top_p_renorm_prob = None  # no request here asks for it
    kernels.tree_speculative_sampling_target_only = tree_sampling
    kernels.top_k_renorm_prob = of_the_likeliest


def softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Probabilities [rows, vocabulary] float32 at ``temperatures`` [rows, 1]."""
    return (logits.float() / temperatures).softmax(-1)


def of_the_likeliest(probabilities: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Those of each row's ``top_ks`` [rows] likeliest tokens alone: one of a greedy request among others."""
    ordered = probabilities.sort(-1, descending=True).values
    last = (top_ks.long() - 1).clamp(0, probabilities.shape[-1] - 1)
    kept = torch.where(probabilities >= ordered.gather(-1, last[:, None]), probabilities, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def tree_sampling(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    threshold_single: float,
    threshold_acc: float,
    **_: Any,
) -> None:
    """Tokens drawn from the target's probabilities, drafts among them; a kernel of SGLang's.

    Of a node's drafts those that lie below the node's coin, their probabilities added up, are refused, and the next is
    accepted; where all are refused the last token is drawn from what the refused ones leave.

    Args
        predicts: flat [B * N], receives the token after every accepted node.
        accept_index: [B, depth] of -1, receives flat indices of the accepted nodes, root first.
        accept_token_num: [B], receives the accepted nodes without the root.
        candidates, retrive_*: [B, N] draft tokens and links, -1 for none.
        uniform_samples, uniform_samples_for_final_sampling: [B, N] and [B], coins from 0 to 1.
        target_probs: [B, N, vocabulary].
    """
    if (threshold_single, threshold_acc) != (1.0, 1.0):
        raise NotImplementedError(
            f"thresholds of {threshold_single} and {threshold_acc}: drafts are drawn exactly here"
        )
    drafts, index = candidates.tolist(), retrive_index.tolist()
    first, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for row, coins in enumerate(uniform_samples.tolist()):
        path, coin = [0], coins[0]
        left = target_probs[row, 0].clone()
        while len(path) < accept_index.shape[1]:
            node, below = first[row][path[-1]], 0.0
            while node >= 0:
                below += float(target_probs[row, path[-1], drafts[row][node]])
                if coin <= below:
                    break
                left[drafts[row][node]] = 0.0
                node = sibling[row][node]
            if node < 0:
                break
            path.append(node)
            coin, left = coins[node], target_probs[row, node].clone()
        sums = left.cumsum(0)
        last = int((sums <= uniform_samples_for_final_sampling[row] * sums[-1]).sum())
        said = [*(drafts[row][node] for node in path[1:]), min(last, len(left) - 1)]
        where = [index[row][node] for node in path]
        accept_index[row, : len(where)] = torch.tensor(where, dtype=accept_index.dtype)
        accept_token_num[row] = len(path) - 1
        predicts[torch.tensor(where)] = torch.tensor(said, dtype=predicts.dtype)
