"""Random lives of requests over one mamba pool, in every mode of our own and both families, against a model that keeps
every state.

A hypothesis state machine admits requests (fresh, or on top of a cached prefix), drafts and commits random trees with
random accept lengths over random subsets of the running requests, tracks, decodes plainly, forks, round-trips through
the host, retracts, aborts, finishes and recycles slots and rows, sleeps and loads other weights, as SGLang does; after
every step a random slot's state must be the naive one. Every path that could leave a stale pending count, a wrong
window position, an index into somebody else's draft slots, a stale layout bit or an unsettled slot is in here.

Mode ``snapshot`` lives none: it has no pool and no store of ours. Its slots, draft copies, snapshots and commit are
SGLang's, whose call `hooks.step.commit` passes on as it comes, and nothing of ours outlives a forward. What is ours
there decides about requests and lengths before SGLang acts (tests/hooks/test_radix_cache, tests/plugin/test_tracking,
tests/backends/test_prefill); whole engines show that it decides right (tests/engine/test_equality, test_stress).

`RANDOM_LIVES=5000` in the environment lives so many of each kind, of up to 40 steps, where 160 do in CI. How many
steps they took is printed (``pytest -s``).
"""

from __future__ import annotations

import collections
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("sglang")

from sglang_mamba_mtp.backends.target_verify import TargetVerify
from sglang_mamba_mtp.state.store import VerifyBatch

from .naive import MODELS, Model, Sizes, State, Token

SIZES = Sizes()
SLOTS, ROWS, NODES, PADDING = 9, 4, 4, 1
KV = 1
FAMILY, LAYOUT = st.sampled_from(sorted(MODELS)), st.sampled_from(["vk", "kv"])

STEPS: collections.Counter[str] = collections.Counter()
"""Of all lives, by their kind; what must hold was looked at after each."""


@pytest.fixture(scope="module", autouse=True)
def _steps_are_told():
    yield
    print("\nsteps:", ", ".join(f"{kind} {count}" for kind, count in STEPS.items()))


def _build(pool_class: type, layout: str, nodes: int = NODES):
    """A pool of `SLOTS` slots on the CPU that writes states in ``layout``, for drafts of up to ``nodes`` nodes."""
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
            speculative_num_draft_tokens=nodes,
        )
    return pool


def _layers(model: Model) -> torch.nn.Module:
    """As much of SGLang's model as a fold looks at: Mamba2's mixers with their A."""
    from sglang.srt.layers.attention.mamba.mamba import MambaMixer2

    mixers = torch.nn.ModuleList()
    for A in getattr(model, "A", ()):
        mixer = MambaMixer2.__new__(MambaMixer2)
        torch.nn.Module.__init__(mixer)
        mixer.A = torch.nn.Parameter(A, requires_grad=False)
        mixers.append(mixer)
    return mixers


def _opened(pool_class: type, model: Model, layout: str, page: int = 1, nodes: int = NODES):
    """A pool with its store open, as a backend opens it."""
    pool = _build(pool_class, layout, nodes)
    runner = SimpleNamespace(model=_layers(model), dtype=torch.float32, page_size=page)
    pool.open_store(model.family, runner, max_batch=ROWS + PADDING)
    return pool


def replay_pool(model: Model, threshold: int, layout: str):
    """A pool as replay mode builds it, with its window open."""
    from sglang_mamba_mtp.state.pools import ReplayPool

    with mock.patch.dict(os.environ, SGLANG_MAMBA_MTP_WINDOW=str(threshold)):
        return _opened(ReplayPool, model, layout)


def rewind_pool(model: Model, threshold: int, layout: str, page: int):
    """The same where requests' states are rewound, to multiples of ``page`` tokens."""
    from sglang_mamba_mtp.state.pools import RewindPool

    with mock.patch.dict(os.environ, SGLANG_MAMBA_MTP_WINDOW=str(threshold)):
        return _opened(RewindPool, model, layout, page)


def slots_pool(model: Model, layout: str, nodes: int = NODES):
    """A pool as slots mode builds it, with its draft slots for up to ``nodes`` nodes."""
    from sglang_mamba_mtp.state.pools import DraftSlotPool

    return _opened(DraftSlotPool, model, layout, nodes=nodes)


class _Forwards:
    """SGLang's part of a backend, of which nothing is needed here."""

    def init_forward_metadata(self, forward_batch: object) -> None: ...

    def init_forward_metadata_out_graph(self, forward_batch: object, in_capture: bool = False) -> None: ...


class Backend(TargetVerify, _Forwards):
    """The backends' own flow over a pool: what happens to slots before SGLang's kernels read and write them."""

    def __init__(self, pool) -> None:
        self._pool, self.store = pool, pool.store

    def forward(self, mode: str, slots: torch.Tensor, tracks: torch.Tensor | None, *, graph: bool) -> None:
        """Prepare a forward of ``ForwardMode.<mode>``, for a graph's replay or an eager one."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        batch = SimpleNamespace(forward_mode=ForwardMode[mode])
        self.forward_metadata = SimpleNamespace(mamba_cache_indices=slots, mamba_track_indices=tracks)
        if graph:
            self.init_forward_metadata_out_graph(batch)
        else:
            self.init_forward_metadata(batch)


class Request:
    """A running request: its row, slot, track slot, how many tokens it has committed and the naive state after them;
    ``back`` are the lengths that its newest step can be taken back to, the newest last, and ``trail`` the naive states
    by length since its checkpoint held all it had."""

    def __init__(self, row: int, slot: int, track: int) -> None:
        self.row, self.slot, self.track = row, slot, track
        self.reach(0, State.zero(SIZES))

    def reach(self, length: int, state: State) -> None:
        """It has ``length`` tokens, and no step of its to take back."""
        self.length, self.state, self.back, self.trail = length, state, [length], {length: state}


class Lives(RuleBasedStateMachine):
    """See the module's text. `cached` maps slots the radix cache would own to their naive states."""

    def draw_model(self, family: str, seed: int) -> Model:
        """The model that all requests of this life run; ``seed`` decides what is not drawn by hypothesis."""
        self.rng = torch.Generator().manual_seed(seed)
        self.model = MODELS[family](SIZES, self.rng)
        return self.model

    def live(self, pool) -> None:
        """Begin with ``pool``, whatever its slots held before."""
        self.pool, self.store, self.backend = pool, pool.store, Backend(pool)
        pool.mamba_cache.temporal[:, 1:].normal_(generator=self.rng)
        self.begin_anew()

    #: whether a commit takes snapshots
    tracks = True

    def pick(self, count: int) -> int:
        return int(torch.randint(count, (1,), generator=self.rng))

    def tokens(self, count: int) -> list[Token]:
        return [self.model.token() for _ in range(count)]

    def release(self, request: Request) -> None:
        self.running.remove(request)
        self.free_rows.append(request.row)

    def write(self, slot: int, state: State) -> None:
        """What SGLang's prefill or decode kernels do: write a slot's state in place, as [V, K]."""
        assert self.pool.axis_orders.bits[slot] != KV, f"slot {slot} is written by SGLang and flagged as KV"
        self.pool.mamba_cache.temporal[:, slot] = state.temporal.float()
        self.pool.mamba_cache.conv[0][:, slot] = state.conv.float()

    def read(self, slot: int) -> State:
        """A slot's state, in whichever layout its bit says it is."""
        temporal = self.pool.mamba_cache.temporal[:, slot].double()
        if self.pool.axis_orders.bits[slot] == KV:
            *outer, values, keys = temporal.shape
            temporal = temporal.reshape(*outer, keys, values).transpose(-1, -2)
        return State(temporal, self.pool.mamba_cache.conv[0][:, slot].double())

    def advance(self, slot: int, state: State, tokens: list[Token]) -> State:
        """Plain forward over `tokens`: the pool's slot from what it holds, and the naive state from what it should
        hold."""
        held = self.read(slot)
        for token in tokens:
            held, _ = self.model.step(held, token)
            state, _ = self.model.step(state, token)
        self.write(slot, held)
        return state

    def index(self, *slots: int) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int32)

    @precondition(lambda self: self.free_rows and len(self.free_slots) >= 2)
    @rule(length=st.integers(1, 5), from_cache=st.booleans())
    def admit(self, length: int, from_cache: bool) -> None:
        request = Request(self.free_rows.pop(), self.free_slots.pop(), self.free_slots.pop())
        if from_cache and self.cached:
            source = sorted(self.cached)[self.pick(len(self.cached))]
            request.state = self.cached[source]
            self.pool.copy_from(self.index(source).long(), self.index(request.slot).long())
        else:
            self.pool.clear_slots(self.index(request.slot).long())
        self.backend.forward("EXTEND", self.index(request.slot), self.index(request.track), graph=False)
        self.extend(request, length)
        self.running.append(request)

    def settle(self, request: Request) -> None:
        """Its slot holds all it has committed: nothing of that can be taken back any more."""
        self.pool.settle(self.index(request.slot))
        request.reach(request.length, request.state)

    def extend(self, request: Request, count: int) -> None:
        """Plain forward of ``count`` tokens."""
        state = self.advance(request.slot, request.state, self.tokens(count))
        request.reach(request.length + count, state)

    @precondition(lambda self: self.running)
    @rule(length=st.integers(1, 5))
    def continue_chunked_prefill(self, length: int) -> None:
        request = self.running[self.pick(len(self.running))]
        self.backend.forward("EXTEND", self.index(request.slot), None, graph=False)
        self.extend(request, length)

    @precondition(lambda self: self.running)
    @rule(nodes=st.integers(1, NODES), chain=st.booleans(), tracked=st.booleans(), padded=st.booleans())
    def verify_and_commit(self, nodes: int, chain: bool, tracked: bool, padded: bool) -> None:
        order = torch.randperm(len(self.running), generator=self.rng).tolist()
        batch = [self.running[i] for i in order[: 1 + self.pick(len(order))]]
        self.verify(batch, min(nodes, self.store.nodes), chain=chain, tracked=tracked and self.tracks, padded=padded)

    def verify(self, batch: list[Request], nodes: int, *, chain: bool, tracked: bool, padded: bool) -> None:
        """One verify of ``batch`` and its commit."""
        self.pool.enter_forward()
        size = len(batch) + (PADDING if padded else 0)
        trees = [self.tokens(nodes) for _ in range(size)]
        parents = [[-1, *(i - 1 if chain else self.pick(i) for i in range(1, nodes))] for _ in range(size)]
        next_token, next_sibling = links(parents)
        slots = self.index(*(r.slot for r in batch), *(-1 for _ in range(size - len(batch))))
        rows = self.index(*(r.row for r in batch), *(0 for _ in range(size - len(batch)))).long()
        lengths = torch.tensor([*(r.length for r in batch), *(0 for _ in range(size - len(batch)))])
        verify = VerifyBatch(slots, rows, lengths, nodes, chain)
        self.store.prepare(verify, None if chain else next_token, None if chain else next_sibling)
        outputs = self.run_layers(trees, verify)

        last, steps, tracks, after = [], [], [], []
        for b, request in enumerate(batch):
            states: list[State] = []
            for node in range(nodes):
                origin = request.state if parents[b][node] < 0 else states[parents[b][node]]
                state, expected = self.model.step(origin, trees[b][node])
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
            taken = [states[one] for one in reversed(path)]
            after.append((taken, states[node]))
        real = len(batch)
        self.store.commit(
            VerifyBatch(slots[:real], rows[:real], lengths[:real], nodes, chain),
            last_correct=torch.tensor(last, dtype=torch.int64),
            track_slots=torch.tensor(tracks, dtype=torch.int64) if tracked else None,
            steps_to_track=torch.tensor(steps, dtype=torch.int64) if tracked else None,
        )
        for request, (taken, snapshot), node in zip(batch, after, steps, strict=True):
            steps_taken = dict(enumerate(taken, request.length + 1))
            request.back = [request.length, *steps_taken]
            request.trail |= steps_taken
            request.length, request.state = request.length + len(taken), taken[-1]
            if node >= 0 and self.free_slots:
                # The radix cache takes the snapshot, the request gets another slot to track into.
                self.cached[request.track] = snapshot
                request.track = self.free_slots.pop()
                self.pool.overwritten_by_sglang(self.index(request.track))

    def run_layers(self, trees: list[list[Token]], verify: VerifyBatch) -> torch.Tensor:
        """What the backend does in a verify forward: outputs [layers, batch * nodes, value_heads, value_dim]."""
        tokens = [token for tree in trees for token in tree]
        outputs = []
        for layer in range(SIZES.layers):
            x = torch.stack([token.x[layer] for token in tokens])
            gates = {name: torch.stack([token.gates[name][layer] for token in tokens]) for name in self.model.gates}
            weights = {"weight": self.model.conv[layer], "bias": None, "activation": "silu"}
            given = self.store.convolve(layer, x, verify, parts=self.model.parts, **weights)
            outputs.append(self.model.score(self.store, layer, verify, given, gates))
        return torch.stack(outputs)

    @precondition(lambda self: self.running)
    @rule(graph=st.booleans())
    def plain_decode(self, graph: bool) -> None:
        self.backend.forward("DECODE", self.index(*(r.slot for r in self.running)), None, graph=graph)
        for request in self.running:
            self.extend(request, 1)

    @rule(mode=st.sampled_from(["IDLE", "DRAFT_EXTEND_V2"]))
    def forward_that_reads_no_slot(self, mode: str) -> None:
        self.backend.forward(mode, self.index(), None, graph=False)

    @precondition(lambda self: self.running and self.free_slots)
    @rule()
    def fork(self) -> None:
        request, slot = self.running[self.pick(len(self.running))], self.free_slots.pop()
        self.pool.copy_from(self.index(request.slot).long(), self.index(slot).long())
        request.reach(request.length, request.state)  # it was settled for that
        self.cached[slot] = request.state

    @precondition(lambda self: self.running and self.free_slots)
    @rule()
    def retract_to_host_and_resume(self) -> None:
        request, slot = self.running[self.pick(len(self.running))], self.free_slots.pop()
        copy = self.pool.get_cpu_copy(self.index(request.slot).long())
        self.free_slots.insert(0, request.slot)
        self.pool.load_cpu_copy(copy, self.index(slot).long())
        request.slot = slot
        request.reach(request.length, request.state)

    @precondition(lambda self: self.cached and self.free_slots)
    @rule(evicted=st.booleans())
    def send_to_host_and_load(self, evicted: bool) -> None:
        """What HiCache does with a state of the radix cache: it copies the slot's bytes, and later those into another
        slot. ``evicted``: the device has it no more by then."""
        source = sorted(self.cached)[self.pick(len(self.cached))]
        slot, state = self.free_slots.pop(), self.cached[source]
        states = (self.pool.mamba_cache.temporal, *self.pool.mamba_cache.conv)
        self.pool.leave_for_host(self.index(source).long())
        host = [tensor[:, source].clone() for tensor in states]
        if evicted:
            self.free_slots.insert(0, source)
            del self.cached[source]
        self.pool.arrive_from_host(self.index(slot).long())
        for tensor, copied in zip(states, host, strict=True):
            tensor[:, slot] = copied
        self.cached[slot] = state

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
        # its own slot is the next request's own, or the next one's to track in
        self.free_slots += [request.track, request.slot] if self.pick(2) else [request.slot, request.track]
        self.release(request)

    @rule(asleep=st.booleans())
    def sleep_or_load_other_weights(self, asleep: bool) -> None:
        """While nobody runs, and the cache is flushed for it. Asleep the memory is given back, and comes back as
        garbage. Weights are loaded in place, and the pool stays as it is."""
        if self.pick(8):
            return
        if asleep:
            for tensor in tensors_of(self.pool):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)
            self.pool.renew()
        else:
            others = vars(type(self.model)(SIZES, self.rng))
            for name, parameter in vars(self.model).items():
                if isinstance(parameter, torch.Tensor):
                    parameter.copy_(others[name])
            if hasattr(self.pool, "queue"):
                self.pool.queue.forget()  # as `RewindRequests.clear` does
        self.begin_anew()

    def begin_anew(self) -> None:
        """Nobody runs, nothing is cached: all slots and rows are free."""
        self.free_slots, self.free_rows = list(range(1, SLOTS + 1)), list(range(1, ROWS + 1))
        self.running: list[Request] = []
        self.cached: dict[int, State] = {}

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
        STEPS[type(self).__name__] += 1
        # the next forward brings these to their lengths
        waiting = {int(slot) for slot, _ in getattr(self.pool, "queue", ())}
        for slot, state in self.cached.items():
            if slot not in waiting:
                self.check(slot, state)
        if self.running and self.pick(3) == 0:
            request = self.running[self.pick(len(self.running))]
            self.check_running(request)

    def check_running(self, request: Request) -> None:
        self.settle(request)
        self.check(request.slot, request.state)

    def check(self, slot: int, state: State) -> None:
        torch.testing.assert_close(self.read(slot).temporal, state.temporal, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(self.read(slot).conv, state.conv, rtol=1e-5, atol=1e-6)


def tensors_of(pool) -> list[torch.Tensor]:
    """Everything that lies in a pool's memory: its own tensors, its axis orders' and its store's."""
    things = [*vars(pool.axis_orders).values(), *vars(pool.store).values(), *getattr(pool.store, "fields", {}).values()]
    several = [each for thing in things if isinstance(thing, tuple) for each in thing]
    held = {id(thing): thing for thing in (*things, *several) if isinstance(thing, torch.Tensor)}
    return [pool.mamba_cache.temporal, *pool.mamba_cache.conv, *held.values()]


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

    @initialize(family=FAMILY, seed=st.integers(0, 2**20), threshold=st.sampled_from([0, 1, 3, 8]), layout=LAYOUT)
    def start(self, family: str, seed: int, threshold: int, layout: str) -> None:
        self.live(replay_pool(self.draw_model(family, seed), threshold, layout))

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        window = self.store
        assert window.pending[0] == 0
        everywhere = torch.arange(window.shape.capacity).int().expand(ROWS + 1, window.shape.capacity)
        assert torch.equal(window.order.sort(dim=1).values, everywhere)
        for slot in self.cached:
            assert window.pending[slot] == 0, f"slot {slot} is the cache's and has pending tokens"


class RewindLives(ReplayLives):
    """Replay mode where states are rewound: requests end a step late, and give their own slots away."""

    tracks = False
    pages = (1, 1, 2, 5)

    @initialize(
        family=FAMILY,
        seed=st.integers(0, 2**20),
        threshold=st.sampled_from([0, 1, 3, 8]),
        layout=LAYOUT,
    )
    def start(self, family: str, seed: int, threshold: int, layout: str) -> None:
        model = self.draw_model(family, seed)
        self.live(rewind_pool(model, threshold, layout, self.pages[self.pick(len(self.pages))]))

    @precondition(lambda self: self.running)
    @rule(steps=st.integers(0, 6), late=st.booleans(), nodes=st.integers(1, NODES), chain=st.booleans())
    def end_within_the_newest_step(self, steps: int, late: bool, nodes: int, chain: bool) -> None:
        """After some steps more the key ends anywhere in the newest one, or at the page boundary before that; ``late``:
        the request was verified once more before that was seen, alone or with others."""
        request = self.running[self.pick(len(self.running))]
        for _ in range(steps):
            self.verify([request], nodes, chain=chain, tracked=False, padded=False)
        length = request.back[self.pick(len(request.back))]
        length -= length % self.pool.page
        if length not in request.trail:  # its checkpoint was past the boundary before it was ever verified
            return
        state = request.trail[length]
        if late:
            others = [other for other in self.running if other is not request][: self.pick(ROWS)]
            self.verify([request, *others], nodes, chain=chain, tracked=False, padded=False)
        self.pool.give_away(torch.tensor(request.slot), length)
        self.cached[request.slot] = state
        self.free_slots.append(request.track)
        self.release(request)

    def check_running(self, request: Request) -> None:
        """In another slot, or its newest step could not be taken back any more."""
        if self.free_slots:
            slots = (self.index(request.slot), self.index(self.free_slots[0]))
            self.store.state_at(*slots, torch.tensor([request.length]))
            self.check(self.free_slots[0], request.state)

    @invariant()
    def every_length_was_within_reach(self) -> None:
        if hasattr(self, "pool"):
            assert self.store.out_of_reach == 0

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        window = self.store
        everywhere = torch.arange(window.shape.capacity).int().expand(ROWS + 1, window.shape.capacity)
        assert torch.equal(window.order.sort(dim=1).values, everywhere)


class SlotsLives(Lives):
    """Slots mode."""

    @initialize(
        family=FAMILY, seed=st.integers(0, 2**20), layout=LAYOUT, most=st.sampled_from([1, 2, NODES, NODES, NODES])
    )
    def start(self, family: str, seed: int, layout: str, most: int) -> None:
        self.live(slots_pool(self.draw_model(family, seed), layout, most))

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        if not hasattr(self, "pool"):
            return
        store = self.store
        for row, draft in enumerate(store.current_input.tolist()):
            per_row = store.nodes - 1
            own = range(store.first + row * per_row, store.first + (row + 1) * per_row)
            assert draft == -1 or draft in own, f"row {row} reads slot {draft}, which is not its own"
        for slot in self.cached:
            row = int(store.slot_row[slot])
            behind = store.row_slot[row] == slot and store.current_input[row] >= 0
            assert not behind, f"slot {slot} is the cache's and its newest state lies in a draft slot"


ReplayLives.TestCase.settings = RewindLives.TestCase.settings = SlotsLives.TestCase.settings = settings(
    max_examples=int(os.environ.get("RANDOM_LIVES", 160)),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestReplayLives = ReplayLives.TestCase
TestRewindLives = RewindLives.TestCase
TestSlotsLives = SlotsLives.TestCase
