"""Slots mode's indices (place_nodes, commit_slots, newest_slots, forget_inputs) against the design in Python lists."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from mamba_mtp_kernels.common import draft_slots, ops_for, reference
from mamba_mtp_kernels.common.operands import Rows, SlotBooks

OPS = [pytest.param(draft_slots, id="kernel"), pytest.param(reference, id="reference")]
DTYPES = [torch.int32, torch.int64]
POISON = -77


def op(module, name):
    return getattr(module, name if module is draft_slots else f"{name}_reference")


@dataclass
class Books:
    """The three arrays, S canonical slots, R request rows of M draft slots each."""

    current_input: list[int]
    row_slot: list[int]
    slot_row: list[int]
    nodes_per_row: int

    @property
    def first_draft_slot(self) -> int:
        return len(self.slot_row) + 3

    def draft_slot(self, row: int, node: int) -> int:
        return self.first_draft_slot + row * self.nodes_per_row + node

    def read(self, slot: int, row: int) -> int:
        return self.current_input[row] if self.current_input[row] > 0 and self.row_slot[row] == slot else slot

    def server(self, slot: int) -> int | None:
        """The row whose draft slot holds the slot's newest state."""
        row = self.slot_row[slot]
        return row if row >= 0 and self.row_slot[row] == slot and self.current_input[row] > 0 else None

    def place(self, slot: int, row: int, nodes: int) -> tuple[int, list[int]]:
        if slot <= 0:
            return 0, [0] * nodes
        return self.read(slot, row), [self.draft_slot(row, node) for node in range(nodes)]

    def commit(self, slot: int, row: int, last: int) -> None:
        if slot > 0 and last >= 0:
            self.current_input[row], self.row_slot[row] = self.draft_slot(row, last), slot
            self.slot_row[slot] = row

    def newest(self, slot: int) -> int:
        if slot <= 0:
            return 0
        row = self.server(slot)
        return slot if row is None else self.current_input[row]

    def forget(self, slot: int) -> None:
        row = self.server(slot) if slot > 0 else None
        if row is not None:
            self.current_input[row] = -1


class Device:
    """The same books on the device, through the ops."""

    def __init__(self, module, device, books: Books, dtype: torch.dtype = torch.int64):
        self.module, self.device, self.dtype = module, device, dtype
        self.arrays = {
            name: torch.tensor(getattr(books, name), dtype=torch.int32, device=device)
            for name in ("current_input", "row_slot", "slot_row")
        }
        self.region = {"first_draft_slot": books.first_draft_slot, "nodes_per_row": books.nodes_per_row}

    @property
    def books(self) -> SlotBooks:
        return SlotBooks(**self.arrays, **self.region)

    def _rows(self, slots, rows) -> Rows:
        return Rows(self._index(slots), self._index(rows))

    def _index(self, values):
        return torch.tensor(values, dtype=self.dtype, device=self.device)

    def _poison(self, *size):
        return torch.full(size, POISON, dtype=torch.int32, device=self.device)

    def place(self, batch_slots, batch_rows, nodes):
        read, write = self._poison(len(batch_slots) + 1), self._poison(len(batch_slots) + 1, nodes)
        op(self.module, "place_nodes")(read, write, self._rows(batch_slots, batch_rows), self.books)
        assert read[-1] == POISON and (write[-1] == POISON).all(), "written beyond the batch"
        return read[:-1].tolist(), write[:-1].tolist()

    def commit(self, batch_slots, batch_rows, last, steps):
        track_src = self._poison(len(batch_slots) + 1)
        op(self.module, "commit_slots")(
            self.books,
            self._rows(batch_slots, batch_rows),
            last_correct=self._index(last),
            steps_to_track=None if steps is None else self._index(steps),
            track_src=track_src,
        )
        assert track_src[-1] == POISON, "written beyond the batch"
        return track_src[:-1].tolist()

    def newest(self, batch_slots):
        newest = self._poison(len(batch_slots) + 1)
        op(self.module, "newest_slots")(newest, self.books, slots=self._index(batch_slots))
        assert newest[-1] == POISON, "written beyond the batch"
        return newest[:-1].tolist()

    def forget(self, batch_slots):
        op(self.module, "forget_inputs")(self.books, slots=self._index(batch_slots))

    def assert_holds(self, books: Books):
        for name, tensor in self.arrays.items():
            assert tensor.tolist() == getattr(books, name), name


def example() -> Books:
    """Row 0 serves slot 3 from node 2, row 1 went on to slot 5 (it had slot 4), row 2 has committed nothing for slot 6
    since it was forgotten, row 3 holds garbage from before slot 7 was recycled into row 4. Slot 0 is nobody's: its
    entry must not be followed."""
    books = Books([-1] * 6, [-1] * 6, [-1] * 9, nodes_per_row=4)
    for slot, row, last in ((3, 0, 2), (4, 1, 1), (5, 1, 0), (6, 2, 3), (7, 3, 2)):
        books.commit(slot, row, last)
    books.forget(6)
    books.commit(7, 4, 1)
    books.slot_row[0], books.row_slot[5], books.current_input[5] = 5, 0, 99
    return books


@pytest.mark.parametrize("module", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nodes", [1, 3, 4])
def test_place_nodes(module, dtype, nodes, device):
    books = example()
    # slot 4 is served by row 5 now, whose draft slots hold nobody's state; slot 8 has never been verified
    batch = [(3, 0), (0, -(10**6)), (5, 1), (-1, 10**6), (6, 2), (7, 4), (4, 5), (8, 3)]
    on_device = Device(module, device, books, dtype)
    read, write = on_device.place([slot for slot, _ in batch], [row for _, row in batch], nodes)
    expected = [books.place(slot, row, nodes) for slot, row in batch]
    assert read == [first for first, _ in expected]
    assert write == [second for _, second in expected]
    drafts = books.first_draft_slot
    assert read == [drafts + 2, 0, drafts + 4, 0, 6, drafts + 17, 4, 8], "the model itself"
    on_device.assert_holds(books)


@pytest.mark.parametrize("module", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tracking", [True, False])
def test_commit_slots(module, dtype, tracking, device):
    books = example()
    batch = [(3, 0, 1, 0), (0, 10**6, 2, 2), (6, 2, -1, -1), (-1, -(10**6), 3, 1), (8, 1, 3, 3), (4, 5, 0, -1)]
    batch_slots, rows, last, steps = (list(column) for column in zip(*batch, strict=True))
    on_device = Device(module, device, books, dtype)
    track_src = on_device.commit(batch_slots, rows, last, steps if tracking else None)
    for slot, row, node, _ in batch:
        books.commit(slot, row, node)
    on_device.assert_holds(books)
    tracked = [books.draft_slot(row, step) if slot > 0 and step >= 0 else 0 for slot, row, _, step in batch]
    assert track_src == (tracked if tracking else [0] * len(batch))


@pytest.mark.parametrize("module", OPS)
@pytest.mark.parametrize("node", [4, 5, 40, 2**31 - 1])
def test_no_node_leads_to_another_rows_draft_slots(module, node, device):
    """What was accepted, and what is tracked, stays among the row's own, whatever a malformed tree has accepted; the
    last row's would else lie past the pool."""
    books = example()
    last_row = len(books.current_input) - 1
    on_device = Device(module, device, books)
    track_src = on_device.commit([3, 4], [0, last_row], [node] * 2, [node] * 2)
    for slot, row in ((3, 0), (4, last_row)):
        books.commit(slot, row, books.nodes_per_row - 1)
    on_device.assert_holds(books)
    assert track_src == [books.draft_slot(row, books.nodes_per_row - 1) for row in (0, last_row)]


@pytest.mark.parametrize("module", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_newest_and_forget(module, dtype, device):
    books = example()
    on_device = Device(module, device, books, dtype)
    asked = [3, 0, 4, 5, -1, 6, 7, 8]
    newest = on_device.newest(asked)
    assert newest == [books.newest(slot) for slot in asked]
    drafts = books.first_draft_slot
    assert newest == [drafts + 2, 0, 4, drafts + 4, 0, 6, drafts + 17, 8], "the model itself"
    on_device.assert_holds(books)

    asked = [3, 0, 4, -1, 6, 7, 8]
    on_device.forget(asked)
    for slot in asked:
        books.forget(slot)
    on_device.assert_holds(books)
    # row 1 serves slot 5 by now: asking for its old slot 4 has left it alone
    assert books.current_input[1] == drafts + 4
    assert on_device.newest([3, 4, 5, 7]) == [3, 4, drafts + 4, 7]


@pytest.mark.parametrize("module", OPS)
def test_random_lives(module, device):
    """Rows and slots taken and given back at random; more rows than a program's block."""
    generator = torch.Generator().manual_seed(0)
    row_count, slot_count, nodes = 150, 170, 3
    books = Books([-1] * row_count, [-1] * row_count, [-1] * slot_count, nodes_per_row=nodes)
    on_device = Device(module, device, books)

    def some(count, upper):
        return torch.randperm(upper, generator=generator)[:count].tolist()

    for step in range(8):
        if step % 2 == 0:  # in the other steps the same requests go on
            rows = some(140, row_count)
            served = [1 + slot for slot in some(140, slot_count - 1)]
        for index in some(10, 140):
            served[index] = -(index % 2)
        expected = [books.place(slot, row, nodes) for slot, row in zip(served, rows, strict=True)]
        assert on_device.place(served, rows, nodes) == tuple(map(list, zip(*expected, strict=True)))
        last = torch.randint(-1, nodes, (140,), generator=generator).tolist()
        on_device.commit(served, rows, last, None)
        for commit in zip(served, rows, last, strict=True):
            books.commit(*commit)
        asked = some(130, slot_count)
        assert on_device.newest(asked) == [books.newest(slot) for slot in asked]
        forgotten = some(20, slot_count)
        on_device.forget(forgotten)
        for slot in forgotten:
            books.forget(slot)
        on_device.assert_holds(books)


@pytest.mark.parametrize("module", OPS)
def test_empty_batch(module, device):
    books = example()
    on_device = Device(module, device, books)
    assert on_device.place([], [], 2) == ([], [])
    assert on_device.commit([], [], [], []) == []
    assert on_device.newest([]) == []
    on_device.forget([])
    on_device.assert_holds(books)


def test_errors_name_the_argument(device):
    on_device = Device(draft_slots, device, example())
    with pytest.raises(ValueError, match="5 nodes, a request row owns 4"):
        on_device.place([1], [1], 5)
    with pytest.raises(ValueError, match="last_correct"):
        on_device.commit([1, 2], [1, 2], [0], None)
    with pytest.raises(ValueError, match=r"newest: shape \(1,\), expected \[B>=2\]"):
        two = torch.ones(2, dtype=torch.int64, device=device)
        draft_slots.newest_slots(on_device.arrays["row_slot"][:1].clone(), on_device.books, slots=two)
    on_device.arrays["row_slot"] = on_device.arrays["row_slot"].long()
    with pytest.raises(TypeError, match=r"row_slot: dtype torch\.int64"):
        on_device.forget([1])
    on_device.region["first_draft_slot"] = 0
    with pytest.raises(ValueError, match="first_draft_slot 0"):
        on_device.arrays["row_slot"] = on_device.arrays["row_slot"].int()
        on_device.place([1], [1], 2)


def test_ops_for():
    for name in ("place_nodes", "commit_slots", "newest_slots", "forget_inputs"):
        assert getattr(ops_for("cpu"), name) is op(reference, name)
        assert getattr(ops_for("cuda"), name) is op(draft_slots, name)
