"""Random lives of requests over one mamba pool, in every mode of our own, against a model that keeps every state.

A hypothesis state machine admits requests (fresh, or on top of a cached prefix), drafts and commits random trees with
random accept lengths over random subsets of the running requests, tracks, decodes plainly, forks, round-trips through
the host, retracts, aborts, finishes and recycles slots and rows, as SGLang does; after every step a random slot's state
must be the naive one. Every path that could leave a stale pending count, a wrong window position, an index into
somebody else's draft slots, a stale layout bit or an unsettled slot is in here.
"""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("sglang")

from sglang_mamba_mtp.drafts import VerifyBatch

from .naive import Sizes, State, Token, Weights, step

SIZES = Sizes()
SLOTS, ROWS, NODES, PADDING = 9, 4, 4, 1
KV = 1


def _build(pool_class: type, layout: str):
    """A pool of `SLOTS` slots on the CPU that writes states in ``layout``, and SGLang's parameters of it."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=SIZES.value_heads * SIZES.value_dim,
        n_groups=SIZES.heads,
        num_heads=SIZES.value_heads,
        head_dim=SIZES.value_dim,
        state_size=SIZES.key_dim,
        conv_kernel=SIZES.taps,
    )
    layers = list(range(SIZES.layers))
    params = Mamba2CacheParams(
        shape=shape, layers=layers, dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    )
    with mock.patch.dict(os.environ, SGLANG_MAMBA_MTP_STATE_LAYOUT=layout):
        pool = pool_class(
            size=SLOTS,
            spec_state_size=ROWS,
            cache_params=params,
            mamba_layer_ids=layers,
            device="cpu",
            speculative_num_draft_tokens=NODES,
        )
    return pool, params


def replay_pool(threshold: int, layout: str):
    """A pool as replay mode builds it, with its window open."""
    from sglang_mamba_mtp.families import GdnFamily, window_layout
    from sglang_mamba_mtp.pool import MtpMambaPool
    from sglang_mamba_mtp.window import Window

    pool, params = _build(MtpMambaPool, layout)
    sizes = window_layout(GdnFamily, params, layers=SIZES.layers, nodes=NODES, threshold=threshold, dtype=torch.float32)
    cpu = torch.device("cpu")
    pool.open_store(
        sizes,
        lambda: Window(
            sizes,
            verify=GdnFamily.replay(cpu),
            fold=GdnFamily.fold(cpu, model=None),
            fold_first=GdnFamily.fold_first,
            states=pool.mamba_cache.temporal,
            conv_states=pool.mamba_cache.conv[0],
            layouts=pool.layouts,
            rows=pool.request_rows,
            max_batch=ROWS + PADDING,
        ),
    )
    return pool


def slots_pool(layout: str):
    """A pool as slots mode builds it, with its draft slots."""
    from sglang_mamba_mtp.draft_slots import DraftSlots
    from sglang_mamba_mtp.families import GdnFamily
    from sglang_mamba_mtp.pool import DraftSlotPool

    pool, _ = _build(DraftSlotPool, layout)
    pool.open_store(
        "gdn",
        lambda: DraftSlots(
            verify=GdnFamily.slots(torch.device("cpu")),
            states=pool.mamba_cache.temporal,
            conv_states=pool.mamba_cache.conv[0],
            layouts=pool.layouts,
            first=pool.first_draft_slot,
            rows=pool.request_rows,
            nodes=NODES,
            max_batch=ROWS + PADDING,
        ),
    )
    return pool


class Request:
    """A running request: its row, slot, track slot and the naive state after its committed tokens."""

    def __init__(self, row: int, slot: int, track: int, state: State) -> None:
        self.row, self.slot, self.track, self.state = row, slot, track, state


class Lives(RuleBasedStateMachine):
    """See the module's text. `cached` maps slots the radix cache would own to their naive states."""

    def live(self, pool, seed: int) -> None:
        """Begin with ``pool``, whatever its slots held before."""
        self.rng = torch.Generator().manual_seed(seed)
        self.weights = Weights.random(SIZES, self.rng)
        self.pool, self.store = pool, pool.store
        pool.mamba_cache.temporal[:, 1:].normal_(generator=self.rng)
        self.free_slots = list(range(1, SLOTS + 1))
        self.free_rows = list(range(1, ROWS + 1))
        self.running: list[Request] = []
        self.cached: dict[int, State] = {}

    def pick(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self.rng))

    def tokens(self, count: int) -> list[Token]:
        return [Token.random(SIZES, self.rng) for _ in range(count)]

    def release(self, request: Request) -> None:
        self.running.remove(request)
        self.free_rows.append(request.row)

    def write(self, slot: int, state: State) -> None:
        """What SGLang's prefill or decode kernels do: write a slot's state in place, as [V, K]."""
        assert self.pool.layouts.bits[slot] != KV, f"slot {slot} is written by SGLang and flagged as KV"
        self.pool.mamba_cache.temporal[:, slot] = state.temporal.float()
        self.pool.mamba_cache.conv[0][:, slot] = state.conv.float()

    def read(self, slot: int) -> State:
        """A slot's state, in whichever layout its bit says it is."""
        temporal = self.pool.mamba_cache.temporal[:, slot].double()
        if self.pool.layouts.bits[slot] == KV:
            *outer, values, keys = temporal.shape
            temporal = temporal.reshape(*outer, keys, values).transpose(-1, -2)
        return State(temporal, self.pool.mamba_cache.conv[0][:, slot].double())

    def advance(self, slot: int, state: State, tokens: list[Token]) -> State:
        """Plain forward over `tokens`: the pool's slot from what it holds, and the naive state from what it should
        hold."""
        held = self.read(slot)
        for token in tokens:
            held, _ = step(SIZES, self.weights, held, token)
            state, _ = step(SIZES, self.weights, state, token)
        self.write(slot, held)
        return state

    def index(self, *slots: int) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int32)

    @precondition(lambda self: self.free_rows and len(self.free_slots) >= 2)
    @rule(length=st.integers(1, 5), from_cache=st.booleans())
    def admit(self, length: int, from_cache: bool) -> None:
        row, slot, track = self.free_rows.pop(), self.free_slots.pop(), self.free_slots.pop()
        if from_cache and self.cached:
            source = sorted(self.cached)[self.pick(len(self.cached))]
            state = self.cached[source]
            self.pool.copy_from(self.index(source).long(), self.index(slot).long())
        else:
            state = State.zero(SIZES)
            self.pool.clear_slots(self.index(slot).long())
        self.pool.settle_for_sglang(self.index(slot))
        self.pool.overwritten_by_sglang(self.index(track))
        self.running.append(Request(row, slot, track, self.advance(slot, state, self.tokens(length))))

    @precondition(lambda self: self.running)
    @rule(length=st.integers(1, 5))
    def continue_chunked_prefill(self, length: int) -> None:
        request = self.running[self.pick(len(self.running))]
        self.pool.settle_for_sglang(self.index(request.slot))
        request.state = self.advance(request.slot, request.state, self.tokens(length))

    @precondition(lambda self: self.running)
    @rule(nodes=st.integers(1, NODES), chain=st.booleans(), tracked=st.booleans(), padded=st.booleans())
    def verify_and_commit(self, nodes: int, chain: bool, tracked: bool, padded: bool) -> None:
        order = torch.randperm(len(self.running), generator=self.rng).tolist()
        batch = [self.running[i] for i in order[: 1 + self.pick(len(order))]]
        size = len(batch) + (PADDING if padded else 0)
        trees = [self.tokens(nodes) for _ in range(size)]
        parents = [[-1, *(i - 1 if chain else self.pick(i) for i in range(1, nodes))] for _ in range(size)]
        next_token, next_sibling = links(parents)
        slots = self.index(*(r.slot for r in batch), *(-1 for _ in range(size - len(batch))))
        rows = self.index(*(r.row for r in batch), *(0 for _ in range(size - len(batch)))).long()
        verify = VerifyBatch(slots, rows, nodes, chain)
        self.store.prepare(verify, None if chain else next_token, None if chain else next_sibling)
        outputs = self.run_layers(trees, verify)

        last, steps, tracks, after = [], [], [], []
        for b, request in enumerate(batch):
            states: list[State] = []
            for node in range(nodes):
                origin = request.state if parents[b][node] < 0 else states[parents[b][node]]
                state, expected = step(SIZES, self.weights, origin, trees[b][node])
                states.append(state)
                torch.testing.assert_close(outputs[:, b * nodes + node].double(), expected, rtol=1e-4, atol=1e-5)
            accepted = self.pick(nodes)
            path = [accepted]
            while parents[b][path[-1]] >= 0:
                path.append(parents[b][path[-1]])
            node = path[self.pick(len(path))] if tracked and self.pick(2) else -1
            last.append(accepted)
            steps.append(node)
            tracks.append(request.track)
            after.append((states[accepted], states[node]))
        self.store.commit(
            VerifyBatch(slots[: len(batch)], rows[: len(batch)], nodes, chain),
            last_correct=torch.tensor(last, dtype=torch.int64),
            track_slots=torch.tensor(tracks, dtype=torch.int64) if tracked else None,
            steps_to_track=torch.tensor(steps, dtype=torch.int64) if tracked else None,
        )
        for request, (state, snapshot), node in zip(batch, after, steps, strict=True):
            request.state = state
            if node >= 0 and self.free_slots:
                # The radix cache takes the snapshot, the request gets another slot to track into.
                self.cached[request.track] = snapshot
                request.track = self.free_slots.pop()
                self.pool.overwritten_by_sglang(self.index(request.track))

    def run_layers(self, trees: list[list[Token]], verify: VerifyBatch) -> torch.Tensor:
        """What the backend does in a verify forward: outputs [layers, batch * nodes, HV, V]."""
        keys = SIZES.heads * SIZES.key_dim
        tokens = [token for tree in trees for token in tree]
        outputs = []
        for layer in range(SIZES.layers):
            x = torch.stack([t.x[layer] for t in tokens])
            weight = self.weights.conv[layer]
            y = self.store.convolve(layer, x, verify, weight=weight, bias=None, activation="silu")
            q, k, v = y.split([keys, keys, SIZES.dim - 2 * keys], dim=-1)
            outputs.append(
                self.store.score(
                    layer,
                    verify,
                    q.view(-1, SIZES.heads, SIZES.key_dim),
                    k.view(-1, SIZES.heads, SIZES.key_dim),
                    v.view(-1, SIZES.value_heads, SIZES.value_dim),
                    torch.stack([t.a[layer] for t in tokens]),
                    torch.stack([t.b[layer] for t in tokens]),
                    A_log=self.weights.A_log[layer],
                    dt_bias=self.weights.dt_bias[layer],
                    scale=1.0,
                )
            )
        return torch.stack(outputs)

    @precondition(lambda self: self.running)
    @rule()
    def plain_decode(self) -> None:
        self.pool.settle_for_sglang(self.index(*(r.slot for r in self.running)))
        for request in self.running:
            request.state = self.advance(request.slot, request.state, self.tokens(1))

    @precondition(lambda self: self.running and self.free_slots)
    @rule()
    def fork(self) -> None:
        request, slot = self.running[self.pick(len(self.running))], self.free_slots.pop()
        self.pool.copy_from(self.index(request.slot).long(), self.index(slot).long())
        self.cached[slot] = request.state

    @precondition(lambda self: self.running and self.free_slots)
    @rule()
    def retract_to_host_and_resume(self) -> None:
        request, slot = self.running[self.pick(len(self.running))], self.free_slots.pop()
        copy = self.pool.get_cpu_copy(self.index(request.slot).long())
        self.free_slots.insert(0, request.slot)
        self.pool.load_cpu_copy(copy, self.index(slot).long())
        request.slot = slot

    @precondition(lambda self: self.running)
    @rule()
    def finish_donating_the_active_slot(self) -> None:
        request = self.running[self.pick(len(self.running))]
        self.pool.settle(self.index(request.slot))
        self.cached[request.slot] = request.state
        self.free_slots.append(request.track)
        self.release(request)

    @precondition(lambda self: self.running)
    @rule()
    def finish_or_abort_dropping_the_active_slot(self) -> None:
        request = self.running[self.pick(len(self.running))]
        self.free_slots += [request.slot, request.track]
        self.release(request)

    @precondition(lambda self: self.cached)
    @rule()
    def evict(self) -> None:
        slot = sorted(self.cached)[self.pick(len(self.cached))]
        del self.cached[slot]
        self.free_slots.append(slot)

    @invariant()
    def states_are_the_naive_ones(self) -> None:
        if not hasattr(self, "pool"):
            return
        for slot, state in self.cached.items():
            self.check(slot, state)
        if self.running and self.pick(3) == 0:
            request = self.running[self.pick(len(self.running))]
            self.pool.settle(self.index(request.slot))
            self.check(request.slot, request.state)

    def check(self, slot: int, state: State) -> None:
        torch.testing.assert_close(self.read(slot).temporal, state.temporal, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(self.read(slot).conv, state.conv, rtol=1e-5, atol=1e-6)


def links(parents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's retrieve_next_token and retrieve_next_sibling [batch, nodes] for parent lists; -1 for none."""
    batch, nodes = len(parents), len(parents[0])
    first, sibling = torch.full((2, batch, nodes), -1, dtype=torch.int64)
    for b, row in enumerate(parents):
        newest: dict[int, int] = {}
        for node, parent in enumerate(row):
            if parent in newest:
                sibling[b, newest[parent]] = node
            elif parent >= 0:
                first[b, parent] = node
            newest[parent] = node
    return first, sibling


class ReplayLives(Lives):
    """Replay mode."""

    @initialize(
        seed=st.integers(0, 2**20), threshold=st.sampled_from([0, 1, 3, 8]), layout=st.sampled_from(["vk", "kv"])
    )
    def start(self, seed: int, threshold: int, layout: str) -> None:
        self.live(replay_pool(threshold, layout), seed)

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        window = self.store
        assert window.pending[0] == 0
        everywhere = torch.arange(window.layout.capacity).int().expand(ROWS + 1, window.layout.capacity)
        assert torch.equal(window.order.sort(dim=1).values, everywhere)
        for slot in self.cached:
            assert window.pending[slot] == 0, f"slot {slot} is the cache's and has pending tokens"


class SlotsLives(Lives):
    """Slots mode."""

    @initialize(seed=st.integers(0, 2**20), layout=st.sampled_from(["vk", "kv"]))
    def start(self, seed: int, layout: str) -> None:
        self.live(slots_pool(layout), seed)

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        store = self.store
        for row, draft in enumerate(store.current_input.tolist()):
            own = range(store.first + row * NODES, store.first + (row + 1) * NODES)
            assert draft == -1 or draft in own, f"row {row} reads slot {draft}, which is not its own"
        for slot in self.cached:
            row = int(store.slot_row[slot])
            behind = store.row_slot[row] == slot and store.current_input[row] >= 0
            assert not behind, f"slot {slot} is the cache's and its newest state lies in a draft slot"


ReplayLives.TestCase.settings = SlotsLives.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestReplayLives = ReplayLives.TestCase
TestSlotsLives = SlotsLives.TestCase
