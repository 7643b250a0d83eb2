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
    """The three arrays, S canonical slots, R request rows of M draft slots each; and, of every running request, where
    its verify's nodes wrote."""

    current_input: list[int]
    row_slot: list[int]
    slot_row: list[int]
    slots_per_row: int

    @property
    def first_draft_slot(self) -> int:
        return len(self.slot_row) + 3

    def draft_slot(self, row: int, index: int) -> int:
        return self.first_draft_slot + row * self.slots_per_row + index

    def places(self, slot: int, row: int) -> list[int]:
        return [slot, *(self.draft_slot(row, index) for index in range(self.slots_per_row))]

    def read(self, slot: int, row: int) -> int:
        return self.current_input[row] if self.current_input[row] > 0 and self.row_slot[row] == slot else slot

    def server(self, slot: int) -> int | None:
        """The row whose draft slot holds the slot's newest state."""
        row = self.slot_row[slot]
        return row if row >= 0 and self.row_slot[row] == slot and self.current_input[row] > 0 else None

    def place(self, slot: int, row: int, nodes: int) -> tuple[int, list[int]]:
        """Where the row's verify reads, and where its nodes write: in turn, from the place that is read on."""
        if slot <= 0:
            return 0, [0] * nodes
        ring, read = self.places(slot, row), self.read(slot, row)
        while ring[0] != read:
            ring.append(ring.pop(0))
        return read, ring[:nodes]

    def commit(self, slot: int, row: int, written: list[int], last: int) -> None:
        if slot > 0 and last >= 0:
            newest = written[min(last, len(written) - 1)]
            self.current_input[row], self.row_slot[row] = -1 if newest == slot else newest, slot
            self.slot_row[slot] = row

    def step(self, slot: int, row: int, last: int, nodes: int = 4) -> None:
        """A verify of that many nodes and its commit."""
        self.commit(slot, row, self.place(slot, row, nodes)[1], last)

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
        self.region = {"first_draft_slot": books.first_draft_slot, "slots_per_row": books.slots_per_row}

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

    def commit(self, batch_slots, batch_rows, written, last, steps):
        track_src = self._poison(len(batch_slots) + 1)
        op(self.module, "commit_slots")(
            self.books,
            self._rows(batch_slots, batch_rows),
            write_slots=torch.tensor([*written, [POISON] * len(written[0])], dtype=torch.int32, device=self.device),
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
    """Drafts of up to four nodes. Row 0 serves slot 3 from its last draft slot, after steps to nodes 1 and 2;
    row 1 went on to slot 5, from node 1 (it had slot 4); row 2 has committed nothing for slot 6 since it was forgotten,
    row 3 holds garbage from before slot 7 was recycled into row 4, for which that slot itself is the newest: a root was
    all that was accepted. Slot 0 is nobody's: its entry must not be followed."""
    books = Books([-1] * 6, [-1] * 6, [-1] * 9, slots_per_row=3)
    for slot, row, last in ((3, 0, 1), (3, 0, 2), (4, 1, 1), (5, 1, 1), (6, 2, 3), (7, 3, 2)):
        books.step(slot, row, last)
    books.forget(6)
    books.step(7, 4, 0)
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
    assert read == [slots[0] for slots in write], "a root writes over what it was read from"
    drafts = books.first_draft_slot
    assert read == [drafts + 2, 0, drafts + 3, 0, 6, 7, 4, 8], "the model itself"
    assert write[0] == [drafts + 2, 3, drafts, drafts + 1][:nodes]
    assert write[5] == [7, drafts + 12, drafts + 13, drafts + 14][:nodes]
    on_device.assert_holds(books)


@pytest.mark.parametrize("module", OPS)
def test_one_node_needs_no_draft_slot(module, device):
    books = Books([-1] * 2, [-1] * 2, [-1] * 5, slots_per_row=0)
    on_device = Device(module, device, books)
    assert on_device.place([3, -1], [1, 0], 1) == ([3, 0], [[3], [0]])
    assert on_device.commit([3, -1], [1, 0], [[3], [0]], [0, 0], [0, 0]) == [3, 0]
    books.step(3, 1, 0, nodes=1)
    on_device.assert_holds(books)
    assert on_device.newest([3]) == [3]


@pytest.mark.parametrize("module", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tracking", [True, False])
def test_commit_slots(module, dtype, tracking, device):
    books = example()
    batch = [
        (3, 0, 1, 0),  # on to its own slot, whose snapshot is that of the root
        (0, 10**6, 2, 2),
        (6, 2, -1, -1),
        (-1, -(10**6), 3, 1),
        (8, 1, 3, 3),
        (4, 5, 0, -1),
        (5, 3, 2, 0),
    ]
    batch_slots, rows, last, steps = (list(column) for column in zip(*batch, strict=True))
    written = [books.place(slot, row, 4)[1] for slot, row, _, _ in batch]
    on_device = Device(module, device, books, dtype)
    track_src = on_device.commit(batch_slots, rows, written, last, steps if tracking else None)
    for (slot, row, node, _), slots in zip(batch, written, strict=True):
        books.commit(slot, row, slots, node)
    on_device.assert_holds(books)
    assert books.current_input[0] == -1, "the model itself"
    tracked = [
        slots[step] if slot > 0 and step >= 0 else 0
        for slot, step, slots in zip(batch_slots, steps, written, strict=True)
    ]
    assert track_src == (tracked if tracking else [0] * len(batch))


@pytest.mark.parametrize("module", OPS)
@pytest.mark.parametrize("node", [4, 5, 40, 2**31 - 1])
def test_no_node_leads_to_another_rows_draft_slots(module, node, device):
    """What was accepted, and what is tracked, stays among the row's own, whatever a malformed tree has accepted; the
    last row's would else lie past the pool."""
    books = example()
    last_row = len(books.current_input) - 1
    on_device = Device(module, device, books)
    written = [books.place(slot, row, 4)[1] for slot, row in ((3, 0), (4, last_row))]
    track_src = on_device.commit([3, 4], [0, last_row], written, [node] * 2, [node] * 2)
    for slot, row, slots in ((3, 0, written[0]), (4, last_row, written[1])):
        books.commit(slot, row, slots, 3)
    on_device.assert_holds(books)
    assert track_src == [slots[3] for slots in written]


@pytest.mark.parametrize("module", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_newest_and_forget(module, dtype, device):
    books = example()
    on_device = Device(module, device, books, dtype)
    asked = [3, 0, 4, 5, -1, 6, 7, 8]
    newest = on_device.newest(asked)
    assert newest == [books.newest(slot) for slot in asked]
    drafts = books.first_draft_slot
    assert newest == [drafts + 2, 0, 4, drafts + 3, 0, 6, 7, 8], "the model itself"
    on_device.assert_holds(books)

    asked = [3, 0, 4, -1, 6, 7, 8]
    on_device.forget(asked)
    for slot in asked:
        books.forget(slot)
    on_device.assert_holds(books)
    # row 1 serves slot 5 by now: asking for its old slot 4 has left it alone
    assert books.current_input[1] == drafts + 3
    assert on_device.newest([3, 4, 5, 7]) == [3, 4, drafts + 3, 7]


@pytest.mark.parametrize("module", OPS)
def test_random_lives(module, device):
    """Rows and slots taken and given back at random; more rows than a program's block."""
    generator = torch.Generator().manual_seed(0)
    row_count, slot_count = 150, 170
    books = Books([-1] * row_count, [-1] * row_count, [-1] * slot_count, slots_per_row=3)
    on_device = Device(module, device, books)

    def some(count, upper):
        return torch.randperm(upper, generator=generator)[:count].tolist()

    for step in range(8):
        nodes = 4 - step % 3  # adaptive speculation
        if step % 2 == 0:  # in the other steps the same requests go on
            rows = some(140, row_count)
            served = [1 + slot for slot in some(140, slot_count - 1)]
        for index in some(10, 140):
            served[index] = -(index % 2)
        expected = [books.place(slot, row, nodes) for slot, row in zip(served, rows, strict=True)]
        reads, written = map(list, zip(*expected, strict=True))
        assert on_device.place(served, rows, nodes) == (reads, written)
        last = torch.randint(-1, nodes, (140,), generator=generator).tolist()
        on_device.commit(served, rows, written, last, None)
        for commit in zip(served, rows, written, last, strict=True):
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
    assert on_device.commit([], [], [[0, 0]], [], []) == []
    assert on_device.newest([]) == []
    on_device.forget([])
    on_device.assert_holds(books)


def test_errors_name_the_argument(device):
    on_device = Device(draft_slots, device, example())
    with pytest.raises(ValueError, match="5 nodes, a request row owns 3"):
        on_device.place([1], [1], 5)
    with pytest.raises(ValueError, match="last_correct"):
        on_device.commit([1, 2], [1, 2], [[1], [2]], [0], None)
    with pytest.raises(ValueError, match="write_slots"):
        on_device.commit([1, 2, 3], [1, 2, 3], [[1]], [0, 0, 0], None)
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
