"""The dataclasses that stores hand to kernels refuse what no kernel can use, at construction."""

from __future__ import annotations

import pytest
import torch
from mamba_mtp_kernels.common.axis_order import KV, VK
from mamba_mtp_kernels.common.operands import Folds, NodeSlots, Rows, SlotBooks, States, Window
from mamba_mtp_kernels.gdn.window import GdnWindow

SLOTS, ROWS, CAPACITY, LAYERS = 5, 3, 8, 2


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def gdn_window(**changes) -> GdnWindow:
    leading = (LAYERS, ROWS, CAPACITY)
    values = {
        "pending": integers(SLOTS),
        "order": integers(ROWS, CAPACITY),
        "fold_threshold": 2,
        "k": torch.rand(*leading, 1, 4),
        "v": torch.rand(*leading, 2, 6),
        "g": torch.rand(*leading, 2),
        "beta": torch.rand(*leading, 2),
        "factors": torch.rand(*leading, 2, 3),
    }
    return GdnWindow(**values | changes)


def test_states():
    data, order = torch.rand(LAYERS, SLOTS, 2, 4, 6), integers(SLOTS, dtype=torch.uint8)
    states = States(data, order, KV)
    layer = states.layer(1)
    assert layer.data.data_ptr() == data[1].data_ptr() and layer.axis_order is order and layer.write == KV
    assert States(data).write == VK
    with pytest.raises(ValueError, match="KV without an axis_order"):
        States(data, None, KV)
    with pytest.raises(ValueError, match="write: 7"):
        States(data, order, 7)
    with pytest.raises(ValueError, match=r"axis_order: shape \(4,\), expected \[S=5\]"):
        States(data, order[:4])
    with pytest.raises(TypeError, match="axis_order: dtype"):
        States(data, order.int())
    with pytest.raises(ValueError, match="states: strides"):
        States(data.transpose(3, 4))


def test_rows():
    slots = integers(3, dtype=torch.int64)
    assert Rows(slots, slots, integers(4, 2), integers(3, 2, dtype=torch.int64), integers(9)).batch == 3
    assert Rows(slots, slots, integers(1, 2).expand(3, 2), integers(3, 5, dtype=torch.int64)[:, :2]).batch == 3
    with pytest.raises(ValueError, match=r"rows: shape \(2,\), expected \[B=3\]"):
        Rows(slots, slots[:2])
    with pytest.raises(TypeError, match="parents: dtype"):
        Rows(slots, slots, parents=integers(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="parents: strides"):
        Rows(slots, slots, parents=integers(2, 3).T)
    with pytest.raises(ValueError, match=r"ancestors: shape \(3, 4\), expected \[B>=3, N=2\]"):
        Rows(slots, slots, integers(3, 2), integers(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"schedule: shape \(2,\), expected \[B>=3\]"):
        Rows(slots, slots, schedule=integers(2))


def test_node_slots():
    NodeSlots(integers(3), integers(4, 2), integers(4, 2, dtype=torch.int64))
    NodeSlots(integers(3), integers(3, 5)[:, :2])
    with pytest.raises(ValueError, match=r"write_slots: shape \(2, 2\), expected \[B>=3, N=\?\]"):
        NodeSlots(integers(3), integers(2, 2))
    with pytest.raises(ValueError, match=r"parents: shape \(3, 4\), expected \[B>=3, N=2\]"):
        NodeSlots(integers(3), integers(3, 2), integers(3, 4))
    with pytest.raises(TypeError, match="read_slots: dtype"):
        NodeSlots(torch.zeros(3), integers(3, 2))


def test_slot_books():
    row, slot = integers(ROWS), integers(SLOTS)
    SlotBooks(row, row, slot, 9, 4)
    with pytest.raises(ValueError, match=r"row_slot: shape \(5,\), expected \[R=3\]"):
        SlotBooks(row, slot, slot, 9, 4)
    with pytest.raises(TypeError, match="slot_row: dtype"):
        SlotBooks(row, row, slot.long(), 9, 4)
    SlotBooks(row, row, slot, 9, 0)  # drafts of one node
    with pytest.raises(ValueError, match="first_draft_slot 0, slots_per_row 4: expected > 0 and >= 0"):
        SlotBooks(row, row, slot, 0, 4)


def test_folds():
    index = integers(3)
    Folds(index, index.long(), index, index)
    with pytest.raises(ValueError, match="counts: shape"):
        Folds(index, index, index, index[:2])


def test_a_window_of_all_layers_and_of_one():
    window = gdn_window()
    assert GdnWindow.input_names() == ("k", "v", "g", "beta", "factors") and Window.input_names() == ()
    layer = window.layer(1)
    assert layer.pending is window.pending and layer.order is window.order and layer.fold_threshold == 2
    for name in window.input_names():
        whole, one = getattr(window, name), getattr(layer, name)
        assert one.data_ptr() == whole[1].data_ptr() and one.shape == whole.shape[1:]
    layer.check_room(3)
    with pytest.raises(ValueError, match=r"order: capacity 8, expected at least 2 \+ 2 \* 4"):
        layer.check_room(4)


def test_what_the_next_verify_folds():
    """All tokens past the threshold, or all but the newest."""
    pending = torch.tensor([9, 0, 2, 3, 4], dtype=torch.int32)
    newest = torch.tensor([9, 0, 2, 2, 1], dtype=torch.int32)
    slots = torch.tensor([4, 1, 2, 3])
    assert gdn_window(pending=pending).folding(slots).tolist() == [4, 0, 0, 3]
    window = gdn_window(pending=pending, newest=newest, length=integers(SLOTS))
    assert window.folding(slots).tolist() == [3, 0, 0, 1]
    layer = window.layer(1)
    assert layer.newest is newest and layer.length is window.length
    whole = layer.of_all_layers()
    assert whole.newest is newest and whole.order is window.order
    for name in window.input_names():
        one, again = getattr(layer, name), getattr(whole, name)
        assert again.shape == (1, *one.shape) and again.data_ptr() == one.data_ptr()


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"newest": integers(SLOTS)}, ValueError, "newest and length must be given together"),
        ({"length": integers(SLOTS)}, ValueError, "newest and length must be given together"),
        ({"newest": integers(4), "length": integers(SLOTS)}, ValueError, r"newest: shape \(4,\), expected \[S=5\]"),
        (
            {"newest": integers(SLOTS), "length": integers(SLOTS, dtype=torch.int64)},
            TypeError,
            r"length: dtype torch\.int64",
        ),
        ({"fold_threshold": -1}, ValueError, "fold_threshold: -1"),
        ({"page": 16}, ValueError, "page: 16, expected 1, or more where newest is given"),
        ({"newest": integers(SLOTS), "length": integers(SLOTS), "page": 0}, ValueError, "page: 0, expected 1"),
        ({"pending": integers(SLOTS, dtype=torch.int64)}, TypeError, "pending: dtype"),
        ({"order": integers(ROWS, 2 * CAPACITY)[:, ::2]}, ValueError, "order: strides"),
        ({"k": torch.rand(ROWS, CAPACITY, 1, 4)}, ValueError, r"window_v: shape \(2, 3, 8, 2, 6\), expected \[R=3"),
        (
            {"v": torch.rand(LAYERS, ROWS, CAPACITY + 1, 2, 6)},
            ValueError,
            r"window_v: .* expected \[2, R=3, C=8, HV=\?",
        ),
        ({"g": torch.rand(LAYERS, ROWS, CAPACITY, 3)}, ValueError, r"window_g: .* HV=2\]"),
        ({"beta": torch.rand(LAYERS, ROWS, CAPACITY, 4)[..., :2]}, ValueError, "window_beta: strides"),
    ],
)
def test_a_window_that_does_not_fit_itself(changes, error, match):
    with pytest.raises(error, match=match):
        gdn_window(**changes)
