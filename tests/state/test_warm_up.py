"""What is launched before a server is ready: everything a step launches outside its graphs, on padding alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_mamba_mtp.state.store import INDEX_DTYPES, WARM_SIZES, VerifyBatch

LENGTHS = (1, 4)

EXPECTED = {
    "replay": {"build_tree", "plan_rows", "commit_window", "commit_conv", "fold", "fold_conv", "move_states"},
    "slots": {"build_tree", "place_nodes", "commit_slots", "newest_slots", "forget_inputs", "move_states"},
}


class Calls(list):
    """Calls of ops: the op's name, and the tensors of its arguments that hold slots."""

    def record(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            parts = [vars(argument) for argument in args if dataclasses.is_dataclass(argument)]
            named = {key: value for part in (*parts, kwargs) for key, value in part.items()}
            self.append(
                (name, {key: value for key, value in named.items() if key.endswith("slots") or key in ("src", "dst")})
            )
            return op(*args, **kwargs)

        return run

    def watch(self, pool: Any) -> None:
        """Record what the pool's store and axis orders call from now on."""
        for owner, name in ((pool.store, "_common"), (pool.store, "_conv"), (pool.axis_orders, "_ops"), (pool, "_ops")):
            ops = getattr(owner, name)
            setattr(owner, name, type(ops)(*(self.record(*op) for op in zip(ops._fields, ops, strict=True))))
        if hasattr(pool.store, "_fold"):
            pool.store._fold = self.record("fold", pool.store._fold)

    def names(self) -> set[str]:
        return {name for name, _ in self}


@pytest.fixture(params=list(itertools.product(EXPECTED, ("gdn", "mamba2"), ("vk", "kv"))), ids="-".join)
def opened(sglang, request, monkeypatch):
    """A mode's name and its pool, with room for the sizes that are warmed up."""
    from tests.stateful import naive, test_lives

    mode, family, layout = request.param
    monkeypatch.setattr(test_lives, "PADDING", max(WARM_SIZES))
    model = naive.MODELS[family](naive.Sizes(), torch.Generator().manual_seed(0))
    make = {
        "replay": lambda: test_lives.replay_pool(model, 8, layout),
        "slots": lambda: test_lives.slots_pool(model, layout),
    }
    return mode, layout, family, make[mode]()


def contents(pool) -> list[torch.Tensor]:
    """All that a warm-up must leave alone; slot 0 is nobody's."""
    slots = (pool.mamba_cache.temporal[:, 1:], pool.mamba_cache.conv[0][:, 1:], pool.axis_orders.bits[1:])
    return [tensor.clone() for tensor in (*slots, *pool.store.bookkeeping, *getattr(pool.store, "fields", {}).values())]


@pytest.mark.parametrize("tracked", [False, True])
def test_everything_on_padding_alone(opened, tracked):
    mode, layout, _, pool = opened
    pool.mamba_cache.temporal.normal_()
    pool.mamba_cache.conv[0].normal_()
    before, calls = contents(pool), Calls()
    calls.watch(pool)
    pool.warm_up(LENGTHS, tracked=tracked)

    expected = EXPECTED[mode] | ({"turn_states"} if layout == "kv" else set())
    assert calls.names() == expected
    for name, slots in calls:
        for argument, tensor in slots.items():
            if tensor is not None:
                assert int(tensor.max()) <= 0, f"{name}: {argument} {tensor.tolist()}"
    for now, then in zip(contents(pool), before, strict=True):
        assert torch.equal(now, then)


def test_the_halves_of_a_commit_follow_one_another(opened):
    """The convolution's half starts while the window's runs: it may, since that has waited for all before it."""
    mode, *_, pool = opened
    calls = Calls()
    calls.watch(pool)
    pool.warm_up(LENGTHS, tracked=True)
    names = [name for name, _ in calls]
    before = {names[at - 1] for at, name in enumerate(names) if name == "commit_conv"}
    assert before == ({"commit_window"} if mode == "replay" else set())


def test_sizes_and_dtypes(opened):
    """Whoever hands over slots does so in every dtype, for each of the sizes that are compiled apart."""
    mode, *_, pool = opened
    calls = Calls()
    calls.watch(pool)
    pool.warm_up(LENGTHS, tracked=True)
    settles = {"replay": ("fold", "src"), "slots": ("newest_slots", "slots")}[mode]
    seen = {(slots[settles[1]].shape[0], slots[settles[1]].dtype) for name, slots in calls if name == settles[0]}
    assert seen == set(itertools.product(WARM_SIZES, INDEX_DTYPES))


def held(store: Any) -> list[torch.Tensor]:
    """A store's own tensors; the states it works on are the pool's."""
    found: list[torch.Tensor] = []
    for name, value in vars(store).items():
        values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        if name not in ("states", "conv_states"):
            found += [each for each in values if isinstance(each, torch.Tensor)]
    return found


def test_a_window_counts_all_its_bytes_and_renews_them(sglang):
    from tests.stateful import naive, test_lives

    store = test_lives.replay_pool(naive.MODELS["gdn"](naive.Sizes(), torch.Generator().manual_seed(0)), 8, "vk").store
    assert store.nbytes == sum(tensor.nbytes for tensor in held(store) if tensor.dim())
    new = [tensor.clone() for tensor in held(store)]
    for tensor in held(store):
        tensor.fill_(77)
    store.renew()
    for tensor, as_made in zip(held(store), new, strict=True):
        assert torch.equal(tensor, as_made)


def test_the_plan_comes_with_the_first_layer(sglang):
    """Not with `prepare`, which may run beside the commit before: that changes what a plan says."""
    from tests.stateful import naive, test_lives

    model = naive.MODELS["gdn"](naive.Sizes(), torch.Generator().manual_seed(0))
    pool, calls = test_lives.replay_pool(model, 8, "vk"), Calls()
    calls.watch(pool)
    store, batch = pool.store, VerifyBatch.padding(2, 4, torch.device("cpu"))
    links = torch.full((2, 4), -1, dtype=torch.int64)
    store.prepare(replace(batch, chain=False), links, links)
    assert "plan_rows" not in calls.names()
    assert store.shape.layers > 1
    dim = store.shape.conv_dim
    parts = {name: tuple(field.shape) for name, field in store.shape.fields.items() if name in ("k", "v")}
    weights = {"weight": torch.zeros(dim, store.conv_states.shape[-1] + 1), "bias": None, "activation": None}
    rest = dim - sum(math.prod(shape) for shape in parts.values())
    for index, plans in ((1, 0), (0, 1), (1, 1)):
        x = torch.zeros(8, dim, dtype=store.shape.conv_dtype)
        store.convolve(index, x, batch, parts={"q": (rest,), **parts}, **weights)
        names = [name for name, _ in calls]
        assert names.count("plan_rows") == plans
    assert names[-3:] == ["plan_rows", "conv1d_verify", "conv1d_verify"]


def test_a_pool_without_speculation_has_nothing_to_warm_up(sglang):
    from sglang_mamba_mtp.state.pools import ReplayPool
    from tests.stateful import test_lives

    pool = test_lives._build(ReplayPool, "vk")
    pool.warm_up(LENGTHS, tracked=True)
    assert pool.store is None
