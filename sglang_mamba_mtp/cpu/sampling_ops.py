"""Drawing in a verify, on a CPU: SGLang's kernels for it need a GPU, and without one it takes the likeliest tokens,
whatever a request's temperature.

`by_temperature` lets its own `eagle_sample` go the way that it goes on a GPU (temperatures, top-k, top-p, coins), to
the versions of its kernels below; DFLASH, which has a verify of its own, asks for them by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from sglang_mamba_mtp.cpu._tree import drafts_after
from sglang_mamba_mtp.cpu.hooking import while_calling
from sglang_mamba_mtp.cpu.speculative_ops import write_accepted

EAGLE_UTILS = "sglang.srt.speculative.eagle_utils"


def by_temperature(eagle_sample: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's verify of a batch, told that this is no CPU where one of its requests is to be drawn."""
    drawing = while_calling(EAGLE_UTILS, _is_cpu=False)(eagle_sample)

    @functools.wraps(eagle_sample)
    def sample(verify_input: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        greedy = batch.sampling_info is None or batch.sampling_info.is_all_greedy
        return (eagle_sample if greedy else drawing)(verify_input, batch, *args, **kwargs)

    return sample


def top_k_renorm_prob(probabilities: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Probabilities ``[rows, vocabulary]`` of each row's ``top_ks`` ``[rows]`` likeliest tokens, ties included, that
    add up to 1. FlashInfer's `top_k_renorm_probs`."""
    return _likeliest(probabilities, probabilities.sort(-1, descending=True).values, top_ks)


def top_p_renorm_prob(probabilities: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Probabilities ``[rows, vocabulary]`` of the likeliest tokens that have ``top_ps`` ``[rows]`` together, ties
    included, that add up to 1. FlashInfer's `top_p_renorm_probs`."""
    ordered = probabilities.sort(-1, descending=True).values
    likelier = ordered.cumsum(-1) - ordered
    return _likeliest(probabilities, ordered, (likelier < top_ps[:, None]).sum(-1))


def _likeliest(probabilities: torch.Tensor, ordered: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Each row's first ``counts`` [rows] of ``ordered``, and their ties, in their places."""
    last = (counts.long() - 1).clamp(0, ordered.shape[-1] - 1)
    kept = torch.where(probabilities >= ordered.gather(-1, last[:, None]), probabilities, 0.0)
    return kept / kept.sum(-1, keepdim=True)


def tree_speculative_sampling_target_only(
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
    """Tokens drawn from the target's probabilities, drafts among them; a kernel of sgl_kernel's by that name.

    Of a node's drafts those above the node's coin, their probabilities added up, are refused, and the next is accepted;
    where all are refused the last token is drawn from what the refused ones leave. (Links that are no tree's:
    `drafts_after`.) Thresholds below 1 accept more than the target would: a draft of at least ``threshold_single``, and
    sums divided by ``threshold_acc``.

    Args
        predicts: flat int32 `[B * N]`, receives the token after every accepted node.
        accept_index: int32 `[B, depth]` of -1, receives flat indices of the accepted nodes, root first.
        accept_token_num: int32 `[B]`, receives the accepted nodes without the root.
        candidates, retrive_*: `[B, N]` draft tokens and links, -1 for none.
        uniform_samples, uniform_samples_for_final_sampling: `[B, N]` and `[B]`, coins from 0 to 1.
        target_probs: `[B, N, vocabulary]`.
    """
    drafts, index = candidates.tolist(), retrive_index.tolist()
    first, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    for row, coins in enumerate(uniform_samples.tolist()):
        path, coin = [0], coins[0]
        left = target_probs[row, 0].clone()
        while len(path) < accept_index.shape[1]:
            below = 0.0
            for node in drafts_after(path[-1], first[row], sibling[row]):
                single = float(target_probs[row, path[-1], drafts[row][node]])
                below += single
                if coin <= below / threshold_acc or single >= threshold_single:
                    break
                left[drafts[row][node]] = 0.0
            else:
                break
            path.append(node)
            coin, left = coins[node], target_probs[row, node].clone()
        sums = left.cumsum(0)
        last = int((sums <= uniform_samples_for_final_sampling[row] * sums[-1]).sum())
        said = [*(drafts[row][node] for node in path[1:]), min(last, len(left) - 1)]
        write_accepted(row, [index[row][node] for node in path], said, predicts, accept_index, accept_token_num)
