"""State error of chained commits against that of SGLang's own decode kernel, for both families.

Accepted tokens go through our windows on one side and one by one through stock on the other; float64 judges both.
4,096 commits need a GPU; in Triton's interpreter a few show that the comparison itself works, and that a fold which is
off by a little is found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from mamba_mtp_kernels.common.operands import FOLD_TOKENS, Folds, States, Window
from mamba_mtp_kernels.common.window import commit_window

from .gdn import case as gdn_case
from .gdn.stock import stock_module
from .helpers import Bookkeeping, rms_ratio
from .mamba2 import case as mamba2_case
from .mamba2.slots_case import Stock

# inputs drawn anew each step -> mean; every token decays the state by about exp(-exp(mean of the decay's input))
GDN_INPUTS = {"q": 0.0, "k": 0.0, "v": 0.0, "a": -6.0, "b": 0.0}
MAMBA2_INPUTS = {"x": 0.0, "B": 0.0, "C": 0.0, "dt": -4.0}


@dataclass(frozen=True)
class Draft:
    """Chains of `nodes`, over a window of `window` tokens. A fold leaves the newest ones, those of the last commit and
    since the last multiple of `page` before it; page None: it takes all."""

    nodes: int
    window: int
    page: int | None = 1

    def __str__(self) -> str:
        return f"{self.nodes} nodes, window {self.window}, page {self.page}"

    def pools(self, batch: int) -> dict[str, Any]:
        """What a family's case is made with."""
        none = [0] * batch
        return {
            "batch": batch,
            "nodes": self.nodes,
            "fold_threshold": self.window,
            "dtype": torch.bfloat16,
            "pending": none,
            "newest": None if self.page is None else none,
        }


ALL_AT_ONCE = Draft(4, 8, page=None)
DEFAULTS = [Draft(4, 12), Draft(8, 16), Draft(16, 20)]
"""Windows as they are by default, and as they rewind (tests/state/test_window.py)."""
LARGE = Draft(17, 17)
"""Folds of more tokens than a tensor core sums at once, whose factors GDN makes in programs of their own."""
PAGED = Draft(4, 67, page=64)
"""The default window where pages are of 64 tokens."""


class Family(ABC):
    """One family's pools at a size, and the three ways a token reaches a state. States are [slots, ...] float32."""

    inputs: dict[str, float]
    float32_inputs: tuple[str, ...] = ()

    def __init__(self, case: Any, draft: Draft, device: torch.device) -> None:
        self.case, self.draft, self.device = case, draft, device
        self.tensors = case.tensors
        case.books.page = draft.page or 1

    @property
    def books(self) -> Bookkeeping:
        return self.case.books

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

    def __init__(self, draft: Draft, batch: int, device: torch.device, **shape: int) -> None:
        from mamba_mtp_kernels.gdn.fold import gdn_fold
        from mamba_mtp_kernels.gdn.verify_replay import gdn_verify

        case = gdn_case.make_case(device=device, gate_shift=-6.0, **draft.pools(batch), **shape)
        super().__init__(case, draft, device)
        self.ours, self._fold, self.stock = gdn_verify, gdn_fold, stock_module()
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=device)

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

    def __init__(
        self, draft: Draft, batch: int, device: torch.device, monkeypatch: pytest.MonkeyPatch, **shape: int
    ) -> None:
        from mamba_mtp_kernels.mamba2.fold import mamba2_fold
        from mamba_mtp_kernels.mamba2.verify_replay import mamba2_verify

        super().__init__(mamba2_case.make_case(device=device, **draft.pools(batch), **shape), draft, device)
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


@dataclass
class Drift:
    """State errors, ours and that of stock's decode; and the most tokens that a verify has folded of a row."""

    ours: float
    stock: float
    folded: int


def drift(family: Family, commits: int, after_folds: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Drift:
    """After `commits` chains with 1 to all of their tokens accepted at random. after_folds: what becomes of states
    [B, ...] in which a verify has folded."""
    books, device, nodes = family.books, family.device, family.draft.nodes
    generator = torch.Generator(device).manual_seed(0)
    slots, count = books.slots.long(), torch.zeros(books.batch, dtype=torch.int32, device=device)
    lengths, folded = torch.zeros_like(count), torch.zeros_like(count)
    checkpoint = family.tensors["checkpoint"]
    theirs = checkpoint.clone()
    exact = theirs[slots].double()
    first = torch.arange(books.batch, device=device) * nodes
    for _ in range(commits):
        family.draw(generator)
        window = family.case.window()
        folding = window.folding(slots)
        folded = torch.maximum(folded, folding)
        family.verify()
        if after_folds is not None:
            touched = slots[folding > 0]
            checkpoint[touched] = after_folds(checkpoint[touched])
        last = torch.randint(0, nodes, (books.batch,), generator=generator, device=device, dtype=torch.int32)
        commit_window(
            window,
            books.batch_rows,
            window_row=books.window_row,
            last_correct=last,
            steps_to_track=None,
            track_count=count,
            lengths=None if window.length is None else lengths,
        )
        lengths += last + 1
        for node in range(nodes):
            on = last >= node
            family.stock_token(theirs, torch.where(on, books.slots, -1), first + node)
            after = family.exact_token(exact, first + node)
            exact = torch.where(on[:, None, None, None], after, exact)
    return Drift(rms_ratio(family.settled(), exact), rms_ratio(theirs[slots], exact), int(folded.max()))


GDN_SHAPES = [{"H": 1, "HV": 1, "K": 16, "V": 16}, {"H": 2, "HV": 4, "K": 128, "V": 128}]
MAMBA2_SHAPES = [
    {"nheads": 2, "headdim": 16, "ngroups": 1, "dstate": 16},
    {"nheads": 8, "headdim": 80, "ngroups": 2, "dstate": 128},
]
SMALL = {"gdn": GDN_SHAPES[0], "mamba2": MAMBA2_SHAPES[0]}
SIZES = [("gdn", shape) for shape in GDN_SHAPES] + [("mamba2", shape) for shape in MAMBA2_SHAPES]


def make_family(
    name: str,
    shape: dict[str, int],
    draft: Draft,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    batch: int = 4,
) -> Gdn | Mamba2:
    if name == "gdn":
        return Gdn(draft, batch, device, **shape)
    return Mamba2(draft, batch, device, monkeypatch, **shape)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("draft", [ALL_AT_ONCE, *DEFAULTS, LARGE, PAGED], ids=str)
@pytest.mark.parametrize(("name", "shape"), SIZES, ids=str)
def test_drift_is_no_larger_than_stock_decodes(
    name: str, shape: dict[str, int], draft: Draft, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 commits with weak decay: what a commit loses, thousands of them show."""
    found = drift(make_family(name, shape, draft, device, monkeypatch), 4096)
    said = f"error {found.ours:.2e}, stock's {found.stock:.2e}"
    print(f"\n{name} {shape}, {draft}: state after 4096 commits: {said}; folded at once {found.folded}")
    assert found.ours <= found.stock, said


SHORT = [(ALL_AT_ONCE, 12), (DEFAULTS[0], 12), (DEFAULTS[1], 8), (DEFAULTS[2], 8), (LARGE, 8)]
"""With the fewest commits in which rows fold twice, or once in more steps than one."""


@pytest.mark.once
@pytest.mark.parametrize(("draft", "commits"), SHORT, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_both_sides_follow_float64(
    name: str, draft: Draft, commits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few commits: the same tokens reach our states, stock's and the exact ones."""
    found = drift(make_family(name, SMALL[name], draft, device, monkeypatch, batch=2), commits)
    assert found.folded > (FOLD_TOKENS if draft == LARGE else 0)
    assert found.ours <= 1e-6 and found.stock <= 1e-6, f"error {found.ours:.2e}, stock's {found.stock:.2e}"


@pytest.mark.once
@pytest.mark.parametrize("name", SMALL)
def test_a_fold_that_is_off_by_a_little_is_found(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = make_family(name, SMALL[name], DEFAULTS[0], device, monkeypatch, batch=2)
    assert drift(family, 8, lambda states: states * (1 + 1e-4)).ours > 1e-5
