"""What a verify's commit refers to, and trees of padded batches: the backends' flow over a pool, without a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.operations import Operations

NODES = 4


@pytest.fixture(params=["replay", "slots"])
def backend(sglang, request):
    """A backend's flow over a pool on the CPU; SGLang's part of it prepares metadata from a batch's own fields."""
    from sglang_mamba_mtp.backends.target_verify import TargetVerify
    from tests.stateful import naive, test_lives

    class Prepared:
        def init_forward_metadata(self, batch: SimpleNamespace) -> None:
            first, sibling = batch.links
            self.forward_metadata = SimpleNamespace(
                mamba_cache_indices=batch.slots, retrieve_next_token=first, retrieve_next_sibling=sibling
            )

        def init_forward_metadata_in_graph(self, batch: SimpleNamespace) -> None: ...

        def init_forward_metadata_out_graph(self, batch: SimpleNamespace, in_capture: bool = False) -> None:
            Prepared.init_forward_metadata(self, batch)

    class Backend(TargetVerify, Prepared):
        def __init__(self, pool) -> None:
            self._pool, self.store = pool, pool.store

    model = naive.MODELS["gdn"](naive.Sizes(), torch.Generator().manual_seed(0))
    pools = {
        "replay": lambda: test_lives.replay_pool(model, 8, "vk"),
        "slots": lambda: test_lives.slots_pool(model, "vk"),
    }
    return Backend(pools[request.param]())


def verify_batch(slots: list[int], rows: list[int], links: tuple = (None, None)) -> SimpleNamespace:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        slots=torch.tensor(slots, dtype=torch.int32),
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(rows),
        links=links,
        forward_mode=ForwardMode.TARGET_VERIFY,
        spec_info=SimpleNamespace(draft_token_num=NODES),
    )


def rows_of(store, slots: list[int]) -> list[int]:
    """The request rows that the store says hold these slots' newest tokens."""
    held = store.window_row if hasattr(store, "window_row") else store.slot_row
    return held[slots].tolist()


def test_commit_goes_to_the_rows_of_the_metadata_in_place(backend):
    """0.5.23 can put a captured step's metadata back without calling the backend (METADATA_GLUE_GRAPH)."""
    captured = verify_batch([5, 6], [1, 2])
    backend.init_forward_metadata_out_graph(captured)
    metadata = backend.forward_metadata
    backend.init_forward_metadata(verify_batch([7, 8, 9], [3, 4, 2]))
    backend.forward_metadata = metadata
    backend.init_forward_metadata_in_graph(captured)
    backend.commit_verify(torch.tensor([1, 1]), None, None)
    assert rows_of(backend.store, [5, 6]) == [1, 2]


@pytest.mark.parametrize("size, nodes", [(1, NODES), (2, NODES), (2, 1), (1, 3)])
def test_rows_of_chains_share_one_tree(backend, size, nodes):
    """At every batch size: another row stride would be another kernel to compile."""
    from sglang_mamba_mtp.state.store import VerifyBatch

    rows = backend.store.rows(VerifyBatch.padding(size, nodes, torch.device("cpu")))
    assert rows.parents.stride(0) == rows.ancestors.stride(0) == 0
    assert rows.parents.tolist() == [list(range(-1, nodes - 1))] * size
    assert rows.ancestors.tolist() == [[2**node - 1 for node in range(nodes)]] * size


def test_nothing_is_filled_between_a_convolution_and_its_verify(sglang):
    """A kernel there would keep the verify from starting while the convolution runs. Padding comes out as zeros."""
    from sglang_mamba_mtp.backends.mamba2 import VerifyMamba2

    nodes, padding, heads, dim = 4, 3, 2, 8
    mixer = SimpleNamespace(
        num_heads=heads, tp_size=1, n_groups=1, head_dim=dim, ssm_state_size=4, activation="silu",
        conv1d=SimpleNamespace(weight=torch.empty(24, 1, 4), bias=None), A=None, D=None, dt_bias=None,
    )  # fmt: skip

    def score(*_, out: torch.Tensor, **__) -> None:
        asked.names.append("verify")
        assert out.shape == (nodes, heads, dim)

    backend = object.__new__(VerifyMamba2)
    backend.forward_metadata = SimpleNamespace(num_decodes=1)
    backend._batch = lambda size: SimpleNamespace(size=size, nodes=nodes)
    backend.store = SimpleNamespace(convolve=lambda *_, **__: asked.names.append("convolution") or {}, score=score)
    with Operations() as asked:
        scored = backend._score(mixer, 0, torch.full((nodes + padding, 24), torch.nan), torch.empty(nodes + padding, 2))
    between = asked.names[asked.names.index("convolution") : asked.names.index("verify")]
    assert not any("zero_" in name or "fill_" in name for name in between)
    assert scored[nodes:].eq(0).all()


@pytest.mark.parametrize("links", [True, False])
def test_a_verify_that_does_not_fit_is_told_before_its_first_layer(backend, links):
    first = torch.full((99, NODES), -1) if links else None
    with pytest.raises(
        ValueError, match=r"a verify of 99 requests x 4 draft nodes does not fit .* raise --max-running"
    ):
        backend.init_forward_metadata(verify_batch([1] * 99, [1] * 99, (first, first)))


@pytest.mark.parametrize("real", [0, 1])
def test_links_of_a_padded_batch(backend, real):
    """MLP sync pads slots and rows, and metadata their links; an idle rank brings none at all."""
    from sglang_mamba_mtp.backends.prefill import _padded

    first = torch.tensor([[1, 3, -1, -1]] * real).view(real, NODES)
    sibling = torch.tensor([[-1, 2, -1, -1]] * real).view(real, NODES)
    slots, rows = ([3, -1], [1, 0]) if real else ([-1, -1], [0, 0])
    backend.init_forward_metadata(verify_batch(slots, rows, (_padded(first, 2), _padded(sibling, 2))))
    parents = backend.store._parents.view(-1)[: real * NODES]
    assert parents.tolist() == [-1, 0, 0, 1] * real
