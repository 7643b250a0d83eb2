"""A slot is promised to a prefill server only when no forward writes it any more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_mamba_mtp.compat import batches
from sglang_mamba_mtp.state.arrivals import Arrivals


class Event:
    """Of a stream whose work is done when the test says so."""

    made: list[Event]

    def __init__(self) -> None:
        self.done, self.waited = False, 0
        self.made.append(self)

    def record(self, stream: object) -> None:
        assert stream == "forwards"

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited += 1
        self.done = True


@pytest.fixture
def events(monkeypatch) -> list[Event]:
    Event.made = []
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    return Event.made


def test_only_its_own_last_owner_is_waited_for(events):
    arrivals, slots = Arrivals(), torch.arange(4)
    for slot in (1, 2):
        arrivals.given_up(slots[slot, None], "forwards")
    arrivals.wait_for(slots[3])
    assert [event.waited for event in events] == [0, 0]
    arrivals.wait_for(slots[2])
    assert [event.waited for event in events] == [0, 1]


def test_a_slot_given_up_twice_waits_for_the_later(events):
    arrivals, slot = Arrivals(), torch.tensor(5)
    for _ in range(2):
        arrivals.given_up(slot.reshape(1), "forwards")
    arrivals.wait_for(slot)
    assert all(event.done for event in events)


def test_a_snapshots_slot_is_waited_for_as_its_owners_is(events):
    """With slots for snapshots that it never took."""
    held = SimpleNamespace(mamba_pool_idx=torch.tensor(3), mamba_ping_pong_track_buffer=torch.tensor([5, -1]))
    arrivals = Arrivals()
    arrivals.given_up(batches.request_slots(held), "forwards")
    arrivals.wait_for(torch.tensor(4))
    assert [event.waited for event in events] == [0]
    arrivals.wait_for(torch.tensor(5))
    assert [event.waited for event in events] == [1]


def test_a_request_without_slots_gives_up_none():
    assert batches.request_slots(SimpleNamespace(mamba_pool_idx=None, mamba_ping_pong_track_buffer=None)) is None


def test_what_is_done_is_forgotten(events):
    arrivals, slots = Arrivals(), torch.arange(9)
    for slot in slots:
        arrivals.given_up(slot.reshape(1), "forwards")
        events[-1].done = True
    assert len(arrivals._given_up) == 1
    arrivals.wait_for(slots[8])
    assert [event.waited for event in events] == [0] * 9


def test_without_streams_there_is_nothing_to_wait_for(events):
    arrivals = Arrivals()
    arrivals.given_up(torch.tensor([1]), None)
    arrivals.wait_for(torch.tensor(1))
    assert events == []
