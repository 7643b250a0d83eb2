"""Reference softmax attention for SGLang's CPU engine, with target verify and draft trees.

Registered under the name `torch_native`: SGLang treats that name as "no Triton" in the places that matter, and its own
backend of this name has no TARGET_VERIFY and no multi-step draft. Per forward the KV rows of every request are gathered
into one padded index table; per layer one batched attention runs over it (prefills: one call a request).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NAME = "torch_native"


def padded_rows(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """KV rows of each request's first `lens[i]` tokens.

    Returns
        `[bs, max(lens)]` int64 rows (0 where padded) and a bool table of the same shape, True where a row is real.
    """
    longest = int(lens.max()) if lens.numel() else 0
    real = torch.arange(longest) < lens.unsqueeze(1)
    rows = req_to_token[req_pool_indices.long(), :longest].long()
    return rows.masked_fill(~real, 0), real


def verify_tree_mask(custom_mask: torch.Tensor | None, seq_lens: torch.Tensor, n: int) -> torch.Tensor:
    """`[bs, n, n]` bool: which draft nodes a draft node may attend to.

    `custom_mask` is SGLang's flat mask, either the `n x n` blocks alone (what the CPU engine builds) or whole
    `n x (seq_len + n)` blocks; None means a chain. Data-parallel attention pads the batch, but not the mask: rows
    beyond it are chains.
    """
    bs = seq_lens.shape[0]
    chain = torch.ones(n, n, dtype=torch.bool).tril().expand(bs, n, n)
    if n == 1 or custom_mask is None or custom_mask.numel() == 0:
        return chain
    with_prefixes = int(seq_lens.sum()) * n + bs * n * n
    if custom_mask.numel() == with_prefixes != bs * n * n:
        blocks, at = [], 0
        for length in seq_lens.tolist():
            width = length + n
            blocks.append(custom_mask[at : at + n * width].view(n, width)[:, length:])
            at += n * width
        return torch.stack(blocks).bool()
    rows, rest = divmod(custom_mask.numel(), n * n)
    if rest or not rows:
        raise ValueError(f"tree mask holds {custom_mask.numel()} entries, expected {bs} x {n} x {n}")
    trees = custom_mask.view(rows, n, n)[:bs].bool()
    return torch.cat([trees, chain[rows:]]) if rows < bs else trees


def padded_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Batched attention with few queries a request; scores and softmax in float32.

    Args
        q: `[bs, n, H, D]`; k: `[bs, L, Hkv, D]`; v: `[bs, L, Hkv, Dv]`; mask: `[bs, n, L]` bool, True = attend. Keys
            and values that nobody attends to may be anything, NaN too.

    Returns
        `[bs, n, H, Dv]` in q's dtype.
    """
    bs, n, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    queries = q.float().view(bs, n, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(bs, kv_heads, group * n, dim)
    scores = queries @ k.float().permute(0, 2, 3, 1) * scale
    scores = scores.view(bs, kv_heads, group, n, -1).masked_fill(~mask[:, None, None], float("-inf"))
    weights = scores.softmax(-1).view(bs, kv_heads, group * n, -1)
    seen = v.float().masked_fill(~mask.any(1)[:, :, None, None], 0.0)
    out = weights @ seen.permute(0, 2, 1, 3)
    out = out.view(bs, kv_heads, group, n, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(bs, n, heads, -1).to(q.dtype)


class CpuAttnBackend(AttentionBackend):
    """Attention over the paged KV cache in plain PyTorch, for EXTEND, DECODE, TARGET_VERIFY and DRAFT_EXTEND."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner):
        super().__init__()
        self.device = model_runner.device
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len = model_runner.model_config.context_len
        # Exactly one of the two is set: the padded table (decode, verify), or the list of prefills.
        self.table: tuple[torch.Tensor, torch.Tensor] | None = None
        self.prefills: list[tuple[int, int, torch.Tensor, int]] | None = None

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of the rows that data-parallel attention pads a batch with: what SGLang's other backends say."""
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value  # what 0.5.23 asks for on a CPU

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Resolve the KV rows of this forward once, for all layers."""
        mode = forward_batch.forward_mode
        req_to_token = self.req_to_token_pool.req_to_token
        rows_of = forward_batch.req_pool_indices
        self.table = self.prefills = None
        if mode.is_idle():
            return
        if mode.is_decode():
            rows, real = padded_rows(req_to_token, rows_of, forward_batch.seq_lens)
            self.table = rows, real.unsqueeze(1)
        elif mode.is_target_verify():
            n = forward_batch.spec_info.draft_token_num
            seq_lens = forward_batch.seq_lens
            prefix, real = padded_rows(req_to_token, rows_of, seq_lens)
            bs = prefix.shape[0]
            rows = torch.cat([prefix, forward_batch.out_cache_loc.view(bs, n).long()], dim=1)
            tree = verify_tree_mask(forward_batch.spec_info.custom_mask, seq_lens, n)
            self.table = rows, torch.cat([real.unsqueeze(1).expand(bs, n, -1), tree], dim=2)
        else:
            prefix_lens = forward_batch.extend_prefix_lens.tolist()
            self.prefills, begin = [], 0
            for i, length in enumerate(forward_batch.extend_seq_lens.tolist()):
                row = req_to_token[rows_of[i], : prefix_lens[i] + length].long()
                self.prefills.append((begin, begin + length, row, prefix_lens[i]))
                begin += length

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """There are no graphs on the CPU: the same as the eager entry point."""
        self.init_forward_metadata(forward_batch)

    def _check(self, layer: RadixAttention) -> None:
        window = layer.sliding_window_size
        if layer.logit_cap or (window is not None and window > -1) or layer.is_cross_attention:
            raise NotImplementedError(
                f"layer {layer.layer_id}: the CPU reference attention of sglang_mamba_mtp has no logit cap, sliding "
                "window or cross attention; serve this model on a GPU"
            )

    def _save(
        self, layer: RadixAttention, forward_batch: ForwardBatch, k: torch.Tensor, v: torch.Tensor, save: bool
    ) -> None:
        if save and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)

    def _caches(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.token_to_kv_pool
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)

    def _attend_table(self, q: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
        if self.table is None:
            raise RuntimeError("CPU attention called before init_forward_metadata of a decode or verify batch")
        rows, mask = self.table
        if layer.attn_type == AttentionType.ENCODER_ONLY:  # whoever is seen by one query of a block is seen by all
            mask = mask.any(1, keepdim=True).expand_as(mask)
        keys, values = self._caches(layer)
        bs, n = mask.shape[:2]
        queries = q[: bs * n].reshape(bs, n, layer.tp_q_head_num, layer.qk_head_dim)
        out = padded_attention(queries, keys[rows], values[rows], mask, layer.scaling)
        out = out.reshape(bs * n, layer.tp_q_head_num * layer.v_head_dim)
        # Data-parallel attention pads a batch after its table was made.
        return F.pad(out, (0, 0, 0, q.shape[0] - bs * n))

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_unused: object,
    ) -> torch.Tensor:
        """One query a request (or a draft branch): `[bs, H * D] -> [bs, H * Dv]`."""
        self._check(layer)
        self._save(layer, forward_batch, k, v, save_kv_cache)
        return self._attend_table(q, layer)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **_unused: object,
    ) -> torch.Tensor:
        """Prefill, draft extend and target verify: `[T, H * D] -> [T, H * Dv]`."""
        self._check(layer)
        self._save(layer, forward_batch, k, v, save_kv_cache)
        if forward_batch.forward_mode.is_target_verify():
            return self._attend_table(q, layer)
        if self.prefills is None:
            raise RuntimeError("CPU attention called before init_forward_metadata of an extend batch")
        keys, values = self._caches(layer)
        heads, group = layer.tp_q_head_num, layer.tp_q_head_num // layer.tp_k_head_num
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        queries = q.view(-1, heads, layer.qk_head_dim)
        out = q.new_zeros(queries.shape[0], heads, layer.v_head_dim)
        for begin, end, rows, prefix in self.prefills:
            kr, vr = (
                cache[rows].to(q.dtype).repeat_interleave(group, dim=1).transpose(0, 1).unsqueeze(0)
                for cache in (keys, values)
            )
            mask = None
            if causal and prefix:
                positions = torch.arange(prefix, prefix + end - begin).unsqueeze(1)
                mask = torch.arange(rows.shape[0]) <= positions
            attended = F.scaled_dot_product_attention(
                queries[begin:end].transpose(0, 1).unsqueeze(0),
                kr,
                vr,
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=layer.scaling,
            )
            out[begin:end] = attended.squeeze(0).transpose(0, 1)
        return out.view(-1, heads * layer.v_head_dim)

    def support_triton(self) -> bool:
        """No Triton kernel may be launched on behalf of this backend."""
        return False


class CpuMultiStepDraftBackend:
    """One decode backend per draft step, `topk` branches a request.

    Branch t of a request writes its step i at cache row `req_to_token[req, start_t + i]`, where `start_t` is
    `seq_len + t * num_steps`, or with pages and several branches the same place within the branch's own page run.
    """

    prefill_attention_backend_str = NAME
    decode_attention_backend_str = NAME

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int):
        self.topk = topk
        self.num_steps = speculative_num_steps
        self.page_size = model_runner.server_args.page_size or 1
        self.attn_backends = [CpuAttnBackend(model_runner) for _ in range(speculative_num_steps - 1)]
        self.device = model_runner.device

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Fill every step's table: the committed prefix, then the branch's own earlier drafts."""
        if forward_batch.forward_mode.is_idle():
            return
        req_to_token = self.attn_backends[0].req_to_token_pool.req_to_token
        seq_lens = forward_batch.seq_lens.long()
        # spec code may hand the batch with rows already repeated per branch; pool rows are per request.
        requests = forward_batch.req_pool_indices.long()[: seq_lens.shape[0]]
        prefix, real = padded_rows(req_to_token, requests, seq_lens)
        prefix, real = prefix.repeat_interleave(self.topk, 0), real.repeat_interleave(self.topk, 0)
        branch = torch.arange(self.topk)
        if self.page_size > 1 and self.topk > 1:
            tail = (seq_lens % self.page_size).unsqueeze(1)
            pages = (tail + self.num_steps + self.page_size - 1) // self.page_size
            start = seq_lens.unsqueeze(1) + branch * pages * self.page_size
        else:
            start = seq_lens.unsqueeze(1) + branch * self.num_steps
        columns = start.unsqueeze(-1) + torch.arange(self.num_steps)
        drafts = req_to_token[requests.view(-1, 1, 1), columns].long().view(-1, self.num_steps)
        for step, backend in enumerate(self.attn_backends):
            rows = torch.cat([prefix, drafts[:, : step + 1]], dim=1)
            visible = torch.cat([real, real.new_ones(real.shape[0], step + 1)], dim=1)
            backend.table, backend.prefills = (rows, visible.unsqueeze(1)), None

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """There are no graphs on the CPU: the same as the eager entry point."""
        self.init_forward_metadata(forward_batch)


def register() -> None:
    """Make these backends what `torch_native` means, for target and draft models."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.speculative import draft_utils

    attention_registry.register_attention_backend(NAME)(CpuAttnBackend)

    def create_decode_backend(self: draft_utils.DraftBackendFactory) -> CpuMultiStepDraftBackend | None:
        if self.speculative_num_steps <= 1:
            return None
        backend = CpuMultiStepDraftBackend(self.draft_model_runner, self.topk, self.speculative_num_steps)
        for child in backend.attn_backends:
            child.prefill_attention_backend_str = child.decode_attention_backend_str = NAME
        return backend

    def create_draft_extend_backend(self: draft_utils.DraftBackendFactory) -> CpuAttnBackend:
        backend = CpuAttnBackend(self.draft_model_runner)
        backend.prefill_attention_backend_str = backend.decode_attention_backend_str = NAME
        return backend

    draft_utils.DraftBackendFactory.create_decode_backend = create_decode_backend
    draft_utils.DraftBackendFactory.create_draft_extend_backend = create_draft_extend_backend
