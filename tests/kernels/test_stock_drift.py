"""State error of chained commits against that of SGLang's own decode kernel, for both families.

Accepted tokens go through our windows on one side and one by one through stock on the other; float64 judges both.
4,096 commits need a GPU; in Triton's interpreter a few show that the comparison itself works.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import pytest
import torch
from mamba_mtp_kernels.common.operands import Folds, States, Window
from mamba_mtp_kernels.common.window import commit_window

from .gdn import case as gdn_case
from .gdn.stock import stock_module
from .helpers import rms_ratio
from .mamba2 import case as mamba2_case
from .mamba2.slots_case import Stock

BATCH, NODES, WINDOW = 4, 4, 8
# inputs drawn anew each step -> mean; every token decays the state by about exp(-exp(mean of the decay's input))
GDN_INPUTS = {"q": 0.0, "k": 0.0, "v": 0.0, "a": -6.0, "b": 0.0}
MAMBA2_INPUTS = {"x": 0.0, "B": 0.0, "C": 0.0, "dt": -4.0}


class Family(ABC):
    """One family's pools at a size, and the three ways a token reaches a state. States are [slots, ...] float32."""

    inputs: dict[str, float]
    float32_inputs: tuple[str, ...] = ()

    def __init__(self, case: Any, device: torch.device) -> None:
        self.case, self.device = case, device
        self.books, self.tensors = case.books, case.tensors

    def draw(self, generator: torch.Generator) -> None:
        """New inputs for every node: bf16, but those stock would round differently in two of its kernels."""
        for name, mean in self.inputs.items():
            fresh = torch.randn(self.tensors[name].shape, generator=generator, device=self.device) + mean
            self.tensors[name] = fresh if name in self.float32_inputs else fresh.bfloat16()

    def settled(self) -> torch.Tensor:
        """The requests' states [B, ...] after all that is pending, and nothing pending any more."""
        slots, window = self.books.slots.long(), self.case.window()
        layers = {name: getattr(window, name)[None] for name in window.input_names()}
        folds = replace(self.books.settling(), rows=self.books.window_row[slots])
        self.fold(States(self.tensors["checkpoint"][None]), replace(window, **layers), folds)
        self.books.pending[slots] = 0
        return self.tensors["checkpoint"][slots]

    @abstractmethod
    def verify(self) -> None:
        """Our verify of all nodes."""

    @abstractmethod
    def fold(self, states: States, window: Window, folds: Folds) -> None:
        """Our fold of one layer."""

    @abstractmethod
    def stock_token(self, states: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Stock's decode of tokens [B] into states at slots [B]; -1: none."""

    @abstractmethod
    def exact_token(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States [B, ...] float64 after tokens [B]."""


class Gdn(Family):
    inputs, float32_inputs = GDN_INPUTS, ("a", "b")

    def __init__(self, device: torch.device, **shape: int) -> None:
        from mamba_mtp_kernels.gdn.fold import gdn_fold
        from mamba_mtp_kernels.gdn.verify_replay import gdn_verify

        pools = {"dtype": torch.bfloat16, "pending": [0] * BATCH, "fold_threshold": WINDOW, "gate_shift": -6.0}
        super().__init__(gdn_case.make_case(batch=BATCH, nodes=NODES, device=device, **pools, **shape), device)
        self.ours, self._fold, self.stock = gdn_verify, gdn_fold, stock_module()
        self.starts = torch.arange(BATCH + 1, dtype=torch.int32, device=device)

    def verify(self) -> None:
        self.case.run(self.ours)

    def fold(self, states: States, window: Window, folds: Folds) -> None:
        self._fold(states, window, folds)

    def stock_token(self, states: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        q, k, v, a, b = (self.tensors[name][tokens] for name in GDN_INPUTS)
        self.stock.fused_sigmoid_gating_delta_rule_update(
            A_log=self.tensors["A_log"], dt_bias=self.tensors["dt_bias"], q=q[None], k=k[None], v=v[None], a=a, b=b,
            initial_state_source=states, initial_state_indices=slots, cu_seqlens=self.starts,
            use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0,
        )  # fmt: skip

    def exact_token(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        k, v, a, b = (self.tensors[name][tokens].double() for name in ("k", "v", "a", "b"))
        k = k / torch.sqrt((k**2).sum(-1, keepdim=True) + 1e-6)
        k = k.repeat_interleave(states.shape[1] // k.shape[1], 1)
        gate = torch.nn.functional.softplus(a + self.tensors["dt_bias"].double())
        states = states * (-self.tensors["A_log"].double().exp() * gate).exp()[..., None, None]
        delta = b.sigmoid()[..., None] * (v - torch.einsum("bhvk,bhk->bhv", states, k))
        return states + delta[..., None] * k[..., None, :]


class Mamba2(Family):
    inputs = MAMBA2_INPUTS

    def __init__(self, device: torch.device, monkeypatch: pytest.MonkeyPatch, **shape: int) -> None:
        from mamba_mtp_kernels.mamba2.fold import mamba2_fold
        from mamba_mtp_kernels.mamba2.verify_replay import mamba2_verify

        pools = {"dtype": torch.bfloat16, "pending": [0] * BATCH, "fold_threshold": WINDOW}
        super().__init__(mamba2_case.make_case(batch=BATCH, nodes=NODES, device=device, **pools, **shape), device)
        self.ours, self._fold = mamba2_verify, mamba2_fold
        self.stock = Stock(monkeypatch, device).module

    def verify(self) -> None:
        self.case.run(self.ours)

    def fold(self, states: States, window: Window, folds: Folds) -> None:
        self._fold(states, window, folds, A=self.tensors["A"][None])

    def stock_token(self, states: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        x, B, C, dt = (self.tensors[name][tokens] for name in MAMBA2_INPUTS)
        headdim, dstate = states.shape[2:]
        self.stock.selective_state_update(
            states, x, dt[..., None].expand(-1, -1, headdim),
            self.tensors["A"][:, None, None].expand(-1, headdim, dstate), B, C,
            D=self.tensors["D"][:, None].expand(-1, headdim), z=None,
            dt_bias=self.tensors["dt_bias"][:, None].expand(-1, headdim), dt_softplus=True,
            state_batch_indices=slots, out=torch.empty_like(x),
        )  # fmt: skip

    def exact_token(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x, B, dt = (self.tensors[name][tokens].double() for name in ("x", "B", "dt"))
        dt = torch.nn.functional.softplus(dt + self.tensors["dt_bias"].double())
        B = B.repeat_interleave(states.shape[1] // B.shape[1], 1)
        decay = torch.exp(dt * self.tensors["A"].double())
        return states * decay[..., None, None] + (dt[..., None] * x)[..., None] * B[..., None, :]


def drift(family: Family, commits: int) -> tuple[float, float]:
    """(our state error, stock's) after `commits` chains with 1 to NODES tokens accepted at random."""
    books, device = family.books, family.device
    generator = torch.Generator(device).manual_seed(0)
    slots, count = books.slots.long(), torch.zeros(BATCH, dtype=torch.int32, device=device)
    theirs = family.tensors["checkpoint"].clone()
    exact = theirs[slots].double()
    first = torch.arange(BATCH, device=device) * NODES
    for _ in range(commits):
        family.draw(generator)
        family.verify()
        last = torch.randint(0, NODES, (BATCH,), generator=generator, device=device, dtype=torch.int32)
        commit_window(
            family.case.window(),
            books.batch_rows,
            window_row=books.window_row,
            last_correct=last,
            steps_to_track=None,
            track_count=count,
        )
        for node in range(NODES):
            on = last >= node
            family.stock_token(theirs, torch.where(on, books.slots, -1), first + node)
            after = family.exact_token(exact, first + node)
            exact = torch.where(on[:, None, None, None], after, exact)
    return rms_ratio(family.settled(), exact), rms_ratio(theirs[slots], exact)


GDN_SHAPES = [{"H": 1, "HV": 1, "K": 16, "V": 16}, {"H": 2, "HV": 4, "K": 128, "V": 128}]
MAMBA2_SHAPES = [
    {"nheads": 2, "headdim": 16, "ngroups": 1, "dstate": 16},
    {"nheads": 8, "headdim": 80, "ngroups": 2, "dstate": 128},
]
SIZES = [("gdn", shape) for shape in GDN_SHAPES] + [("mamba2", shape) for shape in MAMBA2_SHAPES]


def make_family(
    name: str, shape: dict[str, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Gdn | Mamba2:
    return Gdn(device, **shape) if name == "gdn" else Mamba2(device, monkeypatch, **shape)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), SIZES, ids=str)
def test_drift_is_no_larger_than_stock_decodes(
    name: str, shape: dict[str, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 commits with weak decay: what a commit loses, thousands of them show."""
    ours, stock = drift(make_family(name, shape, device, monkeypatch), 4096)
    print(f"\n{name} {shape}: state error after 4096 commits {ours:.2e}, stock's decode {stock:.2e}")
    assert ours <= stock, f"error {ours:.2e}, stock's {stock:.2e}"


@pytest.mark.once
@pytest.mark.parametrize("name", ["gdn", "mamba2"])
def test_both_sides_follow_float64(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few commits: the same tokens reach our states, stock's and the exact ones."""
    shape = {"gdn": GDN_SHAPES[0], "mamba2": MAMBA2_SHAPES[0]}[name]
    ours, stock = drift(make_family(name, shape, device, monkeypatch), 12)
    assert ours <= 1e-6 and stock <= 1e-6, f"error {ours:.2e}, stock's {stock:.2e}"
