"""Copies between a pool and its host tier, token by token against the places they are meant for."""

from __future__ import annotations

import pytest
import torch

from sglang_mamba_mtp.cpu import host_copies

LAYERS, TOKENS, PAGES = 3, 24, 10


def pool(kinds: int) -> list[list[torch.Tensor]]:
    """A tensor [TOKENS, 2, 5] for each layer, of each kind."""
    return [[torch.randn(TOKENS, 2, 5) for _ in range(LAYERS)] for _ in range(kinds)]


def host(kinds: int, page: int) -> list[torch.Tensor]:
    return [torch.full((PAGES, LAYERS, page, 2, 5), torch.nan) for _ in range(kinds)]


@pytest.mark.parametrize("kinds, page", [(1, 1), (2, 1), (2, 4)])
def test_there_and_back(kinds, page):
    """Whole pages go to places of their own; all else stays as it is."""
    there, device, back = host(kinds, page), pool(kinds), pool(kinds)
    kept = [[layer.clone() for layer in layers] for layers in back]
    pages, places, targets = torch.tensor([5, 1, 3]), torch.tensor([2, 9, 4]), torch.tensor([0, 4, 2])

    def of(pages: torch.Tensor) -> torch.Tensor:
        return (pages[:, None] * page + torch.arange(page)).flatten()

    host_copies.transfer_kv_all_layer_direct_lf_pf(
        src_ptrs=[layer for layers in device for layer in layers],
        dst_ptrs=there,
        src_indices=of(pages),
        dst_indices=of(places),
        page_size=page,
    )
    for layer in range(LAYERS):
        host_copies.transfer_kv_per_layer_direct_pf_lf(
            src_ptrs=there,
            dst_ptrs=[layers[layer] for layers in back],
            src_indices=of(places),
            dst_indices=of(targets),
            layer_id=layer,
            page_size=page,
        )
    others = [token for token in range(TOKENS) if token not in of(targets).tolist()]
    for kind in range(kinds):
        untouched = [place for place in range(PAGES) if place not in places.tolist()]
        assert there[kind][untouched].isnan().all()
        for layer in range(LAYERS):
            for one, place in zip(pages.tolist(), places.tolist(), strict=True):
                assert torch.equal(there[kind][place, layer], device[kind][layer][one * page : (one + 1) * page])
            assert torch.equal(back[kind][layer][of(targets)], device[kind][layer][of(pages)])
            assert torch.equal(back[kind][layer][others], kept[kind][layer][others])


def test_tokens_of_layers_as_they_are():
    (source,), (target,) = pool(1), pool(1)
    taken, given = torch.tensor([7, 0, 2]), torch.tensor([1, 2, 23])
    host_copies.transfer_kv_direct(source, target, taken, given, page_size=1)
    for layer in range(LAYERS):
        assert torch.equal(target[layer][given], source[layer][taken])
