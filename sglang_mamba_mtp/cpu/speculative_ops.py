"""Speculative decoding bookkeeping on CPU: cache locations, draft trees, greedy acceptance.

Semantics are those of SGLang's kernels of the same names (`sglang/kernels/ops/speculative`); the argument names keep
the op schema's spelling `retrive_*`. Sizes are tiny (requests x draft nodes), so trees are walked in Python.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from sglang_mamba_mtp.cpu._tree import drafts_after


def _rows_and_columns(
    req_pool_indices: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat (row, column) of every position in `[start_i, end_i)` of request row i, requests one after the other."""
    start, lens = start.long(), (end - start).long()
    rows = req_pool_indices.long().repeat_interleave(lens)
    first = lens.cumsum(0) - lens
    columns = torch.arange(rows.shape[0]) - first.repeat_interleave(lens) + start.repeat_interleave(lens)
    return rows, columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """`req_to_token[req_i, start_i:end_i] = ` the next `end_i - start_i` entries of `out_cache_loc`."""
    rows, columns = _rows_and_columns(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.shape[0]].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The reverse: packs `req_to_token[req_i, start_i:end_i]` into the front of `out_cache_loc`."""
    rows, columns = _rows_and_columns(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.shape[0]] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """`out_cache_loc[i] = req_to_token[req_i, seq_len_i : seq_len_i + topk * num_steps]`, `out` flat `[bs * ...]`."""
    columns = seq_lens.long().unsqueeze(1) + torch.arange(topk * num_steps)
    locs = req_to_token[req_pool_indices.long().unsqueeze(1), columns]
    out_cache_loc.copy_(locs.flatten())


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """`bonus_tokens[i] = accept_tokens[i * accept_stride + accept_lens[i] - 1]`: each request's last accepted token."""
    at = torch.arange(bonus_tokens.shape[0]) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[at])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Packs `out_cache_loc[accept_index]` of the accepted entries (>= 0) into the front of the output."""
    flat = accept_index.flatten()
    chosen = out_cache_loc[flat[flat >= 0].long()]
    accept_out_cache_loc[: chosen.shape[0]] = chosen.to(accept_out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy rows `src_loc` to `tgt_loc` in every KV buffer.

    Args
        data_ptrs: `[buffers]` uint64 base addresses of host memory; strides: `[buffers]` bytes per row.
        tgt_loc, src_loc: `[n]` row numbers; all sources are read before the first write.
    """
    if tgt_loc.numel() == 0:
        return
    target, source = tgt_loc.numpy(), src_loc.numpy()
    rows = int(max(target.max(), source.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        view = np.frombuffer(memory, dtype=np.uint8).reshape(rows, stride)
        view[target] = view[source]


def _tree_parents(parents: list[int], selected: list[int], topk: int) -> list[int]:
    """Parent node of each of the `1 + len(selected)` nodes of one request; -1 for the root.

    EAGLE numbers its candidates `step * topk**2 + ...`; `selected[i] // topk` says which of the previous step's kept
    candidates node i + 1 extends, `parents` which candidate that was.
    """
    position = {candidate: i + 1 for i, candidate in reversed(list(enumerate(selected)))}
    out = [-1]
    for candidate in selected:
        slot = candidate // topk
        out.append(0 if slot == 0 else position.get(parents[slot], -1))
    return out


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Links, positions and mask of EAGLE's draft trees; every output is written in place.

    Args
        parent_list: `[bs, 1 + ...]` candidates kept by the earlier steps; selected_index: `[bs, N - 1]`.
        verified_seq_len: `[bs]` committed lengths.
        tree_mask: flat bool, per request `N x N` (mode 1) or `N x (seq_len + N)`, prefix columns prefilled (mode 0).
        positions: `[bs * N]`; retrive_*: `[bs, N]`, links prefilled with -1.
        topk, depth, draft_token_num: tree shape; N = draft_token_num.
    """
    if tree_mask_mode not in (0, 1):
        raise NotImplementedError(f"build_tree_kernel_efficient_cpu: tree_mask_mode={tree_mask_mode} (bit packing)")
    n = draft_token_num
    seq_lens = verified_seq_len.tolist()
    parent_rows = parent_list.tolist()
    offset = 0
    for i, selected in enumerate(selected_index.tolist()):
        parents = _tree_parents(parent_rows[i], selected, topk)
        allowed = np.zeros((n, n), dtype=bool)
        levels = np.zeros(n, dtype=np.int64)
        next_token, next_sibling, last_child = [-1] * n, [-1] * n, [-1] * n
        allowed[0, 0] = True
        for node in range(1, n):
            parent = parents[node]
            allowed[node, 0] = allowed[node, node] = True
            if parent < 0:
                levels[node] = 1
                continue
            allowed[node] |= allowed[parent]
            levels[node] = levels[parent] + 1
            if next_token[parent] < 0:
                next_token[parent] = node
            else:
                next_sibling[last_child[parent]] = node
            last_child[parent] = node
        if tree_mask_mode == 1:
            tree_mask[i * n * n : (i + 1) * n * n] = torch.from_numpy(allowed).flatten()
        else:
            width = seq_lens[i] + n
            tree_mask[offset : offset + n * width].view(n, width)[:, seq_lens[i] :] = torch.from_numpy(allowed)
            offset += n * width
        positions[i * n : (i + 1) * n] = torch.from_numpy(levels + seq_lens[i])
        retrive_index[i] = torch.arange(i * n, (i + 1) * n)
        retrive_next_token[i] = torch.tensor(next_token)
        retrive_next_sibling[i] = torch.tensor(next_sibling)


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """NGRAM's way round: links and positions from the `[bs, N, N]` ancestor mask (flat bool, self included).

    Outputs as in `build_tree_kernel_efficient_cpu`, all written in place.
    """
    bs, n = batch_size, draft_token_num
    mask = tree_mask[: bs * n * n].view(bs, n, n).bool()
    strict = mask & torch.ones(n, n, dtype=torch.bool).tril(-1)
    positions[: bs * n].copy_((strict.sum(-1) + verified_seq_len.view(bs, 1)).flatten())
    # Topological order: the parent is the largest ancestor.
    parents = torch.where(strict, torch.arange(n), -1).amax(-1)
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    is_child = (parents.unsqueeze(1) == torch.arange(n).view(1, n, 1)) & later
    same_parent = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (parents.unsqueeze(2) >= 0) & later

    def first(candidates: torch.Tensor) -> torch.Tensor:
        lowest = torch.where(candidates, torch.arange(n), n).amin(-1)
        return torch.where(lowest < n, lowest, -1)

    retrive_index.view(-1)[: bs * n].copy_(torch.arange(bs * n))
    retrive_next_token.view(-1)[: bs * n].copy_(first(is_child).flatten())
    retrive_next_sibling.view(-1)[: bs * n].copy_(first(same_parent).flatten())


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree from the root along the target's own tokens. (Links that are no tree's: `drafts_after`.)

    Args
        predicts: flat `[bs * N]`, receives the target's token at every accepted node.
        accept_index: `[bs, depth]` prefilled with -1, receives flat indices of the accepted nodes, root first.
        accept_token_num: `[bs]`, receives the accepted nodes without the root.
        candidates, retrive_*, target_predict: `[bs, N]` draft tokens, links, and the target's greedy tokens.
    """
    bs = candidates.shape[0]
    depth = accept_index.shape[1]
    index, child = retrive_index.tolist(), retrive_next_token.tolist()
    sibling, drafts = retrive_next_sibling.tolist(), candidates.tolist()
    target = target_predict.flatten().tolist()
    for i in range(bs):
        node, path = 0, [index[i][0]]
        while len(path) < depth:
            want = target[path[-1]]
            wanted = (after for after in drafts_after(node, child[i], sibling[i]) if drafts[i][after] == want)
            node = next(wanted, -1)
            if node < 0:
                break
            path.append(index[i][node])
        write_accepted(i, path, [target[p] for p in path], predicts, accept_index, accept_token_num)


def write_accepted(
    row: int,
    path: list[int],
    said: list[int],
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
) -> None:
    """What a verify hands on of one tree: flat indices of its accepted nodes, root first, and the token after each."""
    accept_index[row, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
    accept_token_num[row] = len(path) - 1
    predicts[torch.tensor(path)] = torch.tensor(said, dtype=predicts.dtype)


def gather_spec_extras(
    indices: torch.Tensor,
    topk_p_buf: torch.Tensor,
    topk_index_buf: torch.Tensor,
    output_tokens_buf: torch.Tensor,
    hidden_states_buf: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows `indices` of the buffers the overlap schedule passes drafts through, the optional last one included."""
    rows = indices.long()
    hidden = None if hidden_states_buf is None else hidden_states_buf[rows]
    return topk_p_buf[rows], topk_index_buf[rows], output_tokens_buf[rows], hidden
