"""One verify step of a stack of linear-attention layers, in SGLang's own way and in this project's modes.

A step is what a server does between the projections of its layers: convolution and recurrence of all draft nodes, layer
by layer, then one commit for all layers. A commit is told, as under SGLang's default radix strategy, which rows track a
state and where to. This project's steps run through the objects that a server's backends drive
(sglang_mamba_mtp.state); SGLang's through its kernels, called as its backends call them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from cases import CONV_WIDTH, DTYPES, GdnShape, Mamba2Shape, apart, tree_links, tree_parents, window_cycle
from graph_timing import import_kernels
from stock import StockCommit, StockConv, StockGdn, StockMamba2, split_qkv

import_kernels()

from mamba_mtp_kernels import mamba2  # noqa: E402
from mamba_mtp_kernels.common.operands import NodeSlots, States  # noqa: E402
from mamba_mtp_kernels.conv1d.reference import conv1d_verify_slots_reference  # noqa: E402
from mamba_mtp_kernels.gdn.reference import gdn_verify_slots_reference  # noqa: E402
from mamba_mtp_kernels.mamba2.reference import mamba2_verify_slots_reference  # noqa: E402

from sglang_mamba_mtp.families.table import FAMILIES  # noqa: E402
from sglang_mamba_mtp.names import GDN, MAMBA2  # noqa: E402
from sglang_mamba_mtp.state.axis_order import VK, axis_orders_for  # noqa: E402
from sglang_mamba_mtp.state.draft_slots import DraftSlots, draft_slots  # noqa: E402
from sglang_mamba_mtp.state.store import DraftStore, VerifyBatch  # noqa: E402
from sglang_mamba_mtp.state.window import Window, WindowShape  # noqa: E402

ACTIVATIONS = torch.bfloat16

FUSED_SPLIT_DIM = 8192
"""SGLang's MAX_FUSED_QKV_SPLIT_DIM: up to here it copies q, k and v apart, beyond it takes views."""


Parts = Mapping[str, torch.Tensor]


class Layer(Protocol):
    """Weights of a layer and the calls that differ between families; all layers of a stack share the weights."""

    family: str
    shape: GdnShape | Mamba2Shape
    device: torch.device
    weight: torch.Tensor
    bias: torch.Tensor | None
    parts: dict[str, tuple[int, int]]

    def inputs(self, tokens: int, generator: torch.Generator) -> list[torch.Tensor]:
        """What the input projection gives: x [T, conv dim] first, then what goes past the convolution."""

    def score(self, verify: Callable[..., torch.Tensor], parts: Parts, *rest: torch.Tensor, **extra: Any) -> Any:
        """Run a verify of this project's names on these parts [T, heads, dim] of what was convolved."""

    def output(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors that the backend allocates for the verify to write: x are the convolution's inputs."""

    def fold(self, layers: int) -> Callable[..., None]:
        """The fold as a server's window gets it."""

    def stock(self) -> StockGdn | StockMamba2: ...

    def stock_score(self, stock: Any, y: torch.Tensor, *rest: torch.Tensor, **where: Any) -> torch.Tensor:
        """Run SGLang's verify as its backend does."""

    def stock_decode(
        self, stock: Any, y: torch.Tensor, *rest: torch.Tensor, states: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """Run SGLang's plain decode of one token a row, [B, heads, head dim] from convolved y [B, conv dim]."""


class GdnLayer:
    family = GDN

    def __init__(self, shape: GdnShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        generator = torch.Generator(device).manual_seed(1)
        self.weight = _randn(generator, shape.conv_dim, CONV_WIDTH).to(ACTIVATIONS) * 0.5
        self.bias = None
        self.A_log, self.dt_bias = _randn(generator, shape.HV) * 0.5, _randn(generator, shape.HV) * 0.5
        self.parts = {"q": (shape.H, shape.K), "k": (shape.H, shape.K), "v": (shape.HV, shape.V)}

    def inputs(self, tokens: int, generator: torch.Generator) -> list[torch.Tensor]:
        widths = (self.shape.conv_dim, self.shape.HV, self.shape.HV)
        return [_randn(generator, tokens, width).to(ACTIVATIONS) for width in widths]

    def score(self, verify: Callable[..., torch.Tensor], parts: Parts, *rest: torch.Tensor, **extra: Any) -> Any:
        a, b = rest
        weights = {"A_log": self.A_log, "dt_bias": self.dt_bias, "scale": self.shape.K**-0.5}
        return verify(**parts, a=a, b=b, **weights, **extra)

    def output(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def fold(self, layers: int) -> Callable[..., None]:
        return FAMILIES[GDN].fold(self.device, None)

    def stock(self) -> StockGdn:
        return StockGdn()

    def stock_score(
        self, stock: StockGdn, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **where: Any
    ) -> torch.Tensor:
        shape = self.shape
        heads = {"H": shape.H, "HV": shape.HV, "K": shape.K, "V": shape.V}
        if y.shape[1] <= FUSED_SPLIT_DIM:
            q, k, v = split_qkv(y, **heads)
        else:
            q, k, v = (part[None] for part in split(self, y).values())
        return stock.verify(q, k, v, a, b, A_log=self.A_log, dt_bias=self.dt_bias, **where)

    def stock_decode(
        self, stock: StockGdn, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **where: torch.Tensor
    ) -> torch.Tensor:
        out = y.new_empty(y.shape[0], 1, self.shape.HV, self.shape.V)
        weights = {"A_log": self.A_log, "dt_bias": self.dt_bias, "scale": self.shape.K**-0.5}
        stock.decode(y, a, b, **weights, out=out, **where)
        return out[:, 0]


class Mamba2Layer:
    family = MAMBA2

    def __init__(self, shape: Mamba2Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        generator = torch.Generator(device).manual_seed(2)
        self.weight = _randn(generator, shape.conv_dim, CONV_WIDTH).to(ACTIVATIONS) * 0.5
        self.bias = _randn(generator, shape.conv_dim).to(ACTIVATIONS) * 0.1
        self.A = -torch.rand(shape.nheads, generator=generator, device=device) * 4 - 0.5
        self.D, self.dt_bias = _randn(generator, shape.nheads), _randn(generator, shape.nheads) - 1
        state = (shape.ngroups, shape.dstate)
        self.parts = {"x": (shape.nheads, shape.headdim), "B": state, "C": state}

    @property
    def _inner(self) -> int:
        return self.shape.nheads * self.shape.headdim

    def inputs(self, tokens: int, generator: torch.Generator) -> list[torch.Tensor]:
        # one projection: gate | x B C | dt
        widths = [self._inner, self.shape.conv_dim, self.shape.nheads]
        _, x_B_C, dt = _randn(generator, tokens, sum(widths)).to(ACTIVATIONS).split(widths, dim=-1)
        return [x_B_C, dt.sub_(1)]

    def score(self, verify: Callable[..., torch.Tensor], parts: Parts, *rest: torch.Tensor, **extra: Any) -> Any:
        (dt,) = rest
        weights = {"A": self.A, "D": self.D, "dt_bias": self.dt_bias}
        return verify(**parts, dt=dt, **weights, dt_softplus=True, **extra)

    def output(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": x.new_empty(x.shape[0], *self.parts["x"])}

    def fold(self, layers: int) -> Callable[..., None]:
        return partial(mamba2.ops_for(self.device).mamba2_fold, A=self.A.expand(layers, -1).contiguous())

    def stock(self) -> StockMamba2:
        return StockMamba2()

    def stock_score(self, stock: StockMamba2, y: torch.Tensor, dt: torch.Tensor, **where: Any) -> torch.Tensor:
        batch = where["slots"].shape[0]
        x, B, C = split(self, y).values()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        x, dt, B, C, nodes_out = (tensor.unflatten(0, (batch, -1)) for tensor in (x, dt, B, C, out))
        del where["starts"]
        # SGLang's mixer makes the indices in every layer
        where["indices"] = torch.arange(batch, dtype=torch.int32, device=y.device)
        stock.verify(x, dt, B, C, A=self.A, D=self.D, dt_bias=self.dt_bias, out=nodes_out, **where)
        return out

    def stock_decode(
        self, stock: StockMamba2, y: torch.Tensor, dt: torch.Tensor, **where: torch.Tensor
    ) -> torch.Tensor:
        x, B, C = split(self, y).values()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        stock.decode(x, dt, B, C, A=self.A, D=self.D, dt_bias=self.dt_bias, out=out, **where)
        return out


def split(layer: Layer, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts [T, heads, dim] of convolved y [T, conv dim]."""
    pieces = y.split([heads * dim for heads, dim in layer.parts.values()], dim=-1)
    return {name: piece.unflatten(-1, layer.parts[name]) for name, piece in zip(layer.parts, pieces, strict=True)}


def make_layer(shape: GdnShape | Mamba2Shape, device: torch.device) -> Layer:
    return GdnLayer(shape, device) if isinstance(shape, GdnShape) else Mamba2Layer(shape, device)


def _randn(generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=generator, device=generator.device)


class Drafts:
    """Inputs of `sets` independent batches of `batch` rows with `nodes` draft nodes each.

    Attributes
        slots, rows: [sets, batch], state slot (int32) and request row (int64): permutations of 1.. and of 0..
        track_slots: [sets, batch] int32, behind them: where a row's tracked state goes.
        parents: of every node of a row; links: SGLang's, None for chains.
        accepted: nodes from the root to the one whose acceptance makes nodes/2 + 1 tokens.
        last: [batch], that node; accept_lens: [batch] int32, nodes/2 + 1.
    """

    def __init__(
        self,
        layer: Layer,
        *,
        batch: int,
        nodes: int,
        kind: str,
        sets: int,
        seed: int = 0,
        step_dtype: torch.dtype = torch.int32,
    ) -> None:
        """step_dtype: of node numbers, StockCommit's."""
        self.layer, self.batch, self.nodes, self.chain, self.sets = layer, batch, nodes, kind == "chain", sets
        device, rows = layer.device, sets * batch
        self.generator = torch.Generator(device).manual_seed(seed)
        self.refill()
        self.slots = self._permutation().int() + 1
        self.rows = self._permutation()
        self.parents = tree_parents("chain" if self.chain else "comb", nodes)
        links = torch.tensor(tree_links(self.parents), device=device)[:, None].expand(2, batch, nodes).contiguous()
        self.links = (None, None) if self.chain else (links[0], links[1])
        self.track_slots = self._permutation().int() + 1 + rows
        self.first_draft_slot = 2 * rows + 1
        self.accepted = self.path(nodes // 2 if self.chain else nodes - 1)
        self.last = torch.full((batch,), self.accepted[-1], dtype=step_dtype, device=device)
        self.accept_lens = torch.full((batch,), len(self.accepted), dtype=torch.int32, device=device)

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        path = [node]
        while path[0] > 0:
            path.insert(0, self.parents[path[0]])
        return path

    def tracked(self, rows: int) -> torch.Tensor:
        """[batch]: the middle node of the accepted path in this many rows, evenly apart, and -1 in the others."""
        track = torch.full_like(self.last, -1)
        track[apart(self.batch, rows)] = self.accepted[len(self.accepted) // 2]
        return track

    def refill(self) -> None:
        """Other inputs."""
        tokens = self.batch * self.nodes
        self.inputs = [self.layer.inputs(tokens, self.generator) for _ in range(self.sets)]

    def _permutation(self) -> torch.Tensor:
        rows = self.sets * self.batch
        return torch.randperm(rows, generator=self.generator, device=self.layer.device).view(self.sets, self.batch)


class Step(Protocol):
    """A verify step of all layers for one of the batches (`which`)."""

    states: torch.Tensor
    conv_states: torch.Tensor

    def prepare(self, which: int) -> None:
        """Once a step, before the first layer."""

    def convolve(self, which: int, index: int) -> Any:
        """What `score` takes: convolved inputs of layer `index`, but for what they leave elsewhere for it."""

    def score(self, which: int, index: int, convolved: Any) -> torch.Tensor:
        """[T, heads, head dim]."""

    def gathered(self, which: int, index: int, convolved: Any) -> torch.Tensor:
        """y [T, conv dim], whole, of what `convolve` returned."""

    def given(self, which: int, index: int, y: torch.Tensor) -> Any:
        """What `convolve` returns, for this y."""

    def commit(self, which: int, last: torch.Tensor, track: torch.Tensor) -> None:
        """Once a step: last [batch] is every row's last accepted node, track [batch] the node on its path whose state
        goes to its track slot, or -1."""

    def settle(self, which: int) -> None:
        """Bring the batch's slots and track slots of `states` and `conv_states` up to date, in SGLang's axis order."""


class StockConvolution:
    """SGLang's pools, and its convolution with a window per node: what its ways to verify have in common."""

    def __init__(self, drafts: Drafts, *, layers: int) -> None:
        layer, batch, nodes = drafts.layer, drafts.batch, drafts.nodes
        self.drafts, self.layer, self.conv = drafts, layer, StockConv()
        self.states, self.conv_states = open_pools(layer, layers, drafts.first_draft_slot)
        self.windows = self.conv.windows(layers, batch, nodes, self.conv_states, chain=drafts.chain)
        self.indices = torch.arange(batch, dtype=torch.int32, device=layer.device)
        self.starts = torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32, device=layer.device)
        # the convolution finds the parents from the links, for the recurrence
        self.parents = None if drafts.chain else torch.empty_like(drafts.links[0])

    def prepare(self, which: int) -> None:
        pass

    def convolve(self, which: int, index: int) -> torch.Tensor:
        return self.conv.verify(
            self.drafts.inputs[which][0],
            conv_states=self.conv_states[index],
            weight=self.layer.weight,
            bias=self.layer.bias,
            slots=self.drafts.slots[which],
            windows=self.windows[index],
            indices=self.indices,
            links=self.drafts.links,
            parents=self.parents,
        )

    def gathered(self, which: int, index: int, convolved: torch.Tensor) -> torch.Tensor:
        return convolved

    def given(self, which: int, index: int, y: torch.Tensor) -> torch.Tensor:
        return y


class Stock(StockConvolution):
    """SGLang's: a state and a window per node, scattered at commit."""

    def __init__(self, drafts: Drafts, *, layers: int, hollow: bool = False) -> None:
        """hollow: to compile kernels only; one layer stands for all."""
        layers = 1 if hollow else layers
        super().__init__(drafts, layers=layers)
        self.kernels, self.scatter = self.layer.stock(), StockCommit()
        size = (layers, drafts.batch, drafts.nodes, *self.layer.shape.temporal)
        self.buffer = torch.empty(size, dtype=self.states.dtype, device=self.layer.device)

    def score(self, which: int, index: int, y: torch.Tensor) -> torch.Tensor:
        return self.layer.stock_score(
            self.kernels,
            y,
            *self.drafts.inputs[which][1:],
            states=self.states[index],
            slots=self.drafts.slots[which],
            buffer=self.buffer[index],
            starts=self.starts,
            indices=self.indices,
            parents=self.parents,
        )

    def commit(self, which: int, last: torch.Tensor, track: torch.Tensor) -> None:
        self.scatter.run(
            self.states,
            self.buffer,
            self.conv_states,
            self.windows,
            slots=self.drafts.slots[which],
            last=last,
            track_slots=self.drafts.track_slots[which],
            track=track,
        )

    def settle(self, which: int) -> None:
        pass


class Ours:
    """A mode of this project, on the store that a server's backend would open."""

    def __init__(
        self,
        drafts: Drafts,
        mode: str,
        *,
        layers: int,
        window: int | None,
        state_layout: str = "vk",
        hollow: bool = False,
    ) -> None:
        """mode: "slots", "replay" as under SGLang's radix strategy, or "rewind", replay as it brings states back to a
        length and tracks none. hollow: to compile kernels only; all slots of all layers are one piece of memory."""
        rewinds = mode == "rewind"
        self.tracks = not rewinds
        layer, rows = drafts.layer, drafts.sets * drafts.batch
        self.drafts, self.layer = drafts, layer
        slots = drafts.first_draft_slot + (rows * draft_slots(drafts.nodes) if mode == "slots" else 0)
        self.states, self.conv_states = open_pools(layer, layers, slots, hollow)
        self.axis_orders = axis_orders_for(self.states, state_layout)
        family = FAMILIES[layer.family]
        pools = {"states": self.states, "conv_states": self.conv_states, "axis_orders": self.axis_orders}
        sizes = {"rows": rows, "max_batch": drafts.batch}
        shape = SimpleNamespace(
            temporal=layer.shape.temporal,
            conv=[(layer.shape.conv_dim, CONV_WIDTH - 1)],
            num_k_heads_per_tp=getattr(layer.shape, "H", None),
        )
        window_shape = WindowShape.of(
            family,
            SimpleNamespace(shape=shape),
            layers=layers,
            nodes=drafts.nodes,
            window=window,
            dtype=ACTIVATIONS,
            rewinds_to=int(rewinds),
        )
        stays = len(drafts.accepted) if rewinds else 0
        self.phases = len(window_cycle(len(drafts.accepted), window_shape.threshold, stays, drafts.nodes))
        if mode == "slots":
            self.store: DraftStore = DraftSlots(
                verify=family.slots(layer.device),
                first=drafts.first_draft_slot,
                nodes=drafts.nodes,
                **pools,
                **sizes,
            )
        else:
            self.store = Window(
                window_shape,
                verify=family.replay(layer.device),
                fold=layer.fold(layers),
                **pools,
                **sizes,
            )

    def _batch(self, which: int) -> VerifyBatch:
        drafts = self.drafts
        slots, rows = drafts.slots[which], drafts.rows[which]
        # nobody brings a state back here: any lengths do
        return VerifyBatch(slots, rows, lengths=rows, nodes=drafts.nodes, chain=drafts.chain)

    def prepare(self, which: int) -> None:
        self.store.prepare(self._batch(which), *self.drafts.links)

    def plan(self, which: int) -> None:
        """What `convolve` of the first layer does before all else."""
        self.store.plan_rows(self._batch(which))

    def convolve(self, which: int, index: int) -> dict[str, torch.Tensor]:
        weights = {"weight": self.layer.weight, "bias": self.layer.bias, "activation": "silu"}
        x, parts = self.drafts.inputs[which][0], self.layer.parts
        return self.store.convolve(index, x, self._batch(which), parts=parts, **weights)

    def score(self, which: int, index: int, convolved: dict[str, torch.Tensor]) -> torch.Tensor:
        verify = partial(self.store.score, index, self._batch(which))
        x, *rest = self.drafts.inputs[which]
        return self.layer.score(verify, convolved, *rest, **self.layer.output(x))

    def gathered(self, which: int, index: int, convolved: dict[str, torch.Tensor]) -> torch.Tensor:
        found = dict(convolved)
        for name in self.layer.parts.keys() - found.keys():
            found[name] = self.store.fields[name][index][self._nodes_at(which)].flatten(0, 1)
        return torch.cat([found[name].flatten(1) for name in self.layer.parts], dim=1)

    def given(self, which: int, index: int, y: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = split(self.layer, y)
        if isinstance(self.store, Window):
            batch = self.drafts.batch
            for name in parts.keys() & self.store.fields.keys():
                self.store.fields[name][index][self._nodes_at(which)] = parts.pop(name).unflatten(0, (batch, -1))
        return parts

    def _nodes_at(self, which: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [B, 1] and positions [B, N] of the nodes in the window."""
        drafts, window = self.drafts, self.store
        rows = drafts.rows[which][:, None]
        first = window.pending[drafts.slots[which].long()]
        entries = first[:, None] + torch.arange(drafts.nodes, device=first.device)
        return rows, window.order[rows, entries].long()

    def commit(self, which: int, last: torch.Tensor, track: torch.Tensor) -> None:
        slots = self.drafts.track_slots[which]
        self.store.commit(self._batch(which), last_correct=last, track_slots=slots, steps_to_track=track)

    def settle(self, which: int) -> None:
        slots = torch.cat([self.drafts.slots[which], self.drafts.track_slots[which]])
        self.store.settle(slots)
        self.axis_orders.turn(slots, VK)


class Exact:
    """The same in float64, by the references, from whatever convolved inputs it is given."""

    def __init__(self, drafts: Drafts, states: torch.Tensor, conv_states: torch.Tensor) -> None:
        """states [L, S, ...], conv_states [L, S, dim, K-1] of the canonical slots."""
        self.drafts, self.layer = drafts, drafts.layer
        batch, nodes, device = drafts.batch, drafts.nodes, drafts.layer.device
        self.states, self.conv_states = (
            torch.cat([pool.double(), pool.new_zeros(len(pool), batch * nodes, *pool.shape[2:]).double()], dim=1)
            for pool in (states, conv_states)
        )
        self.write = drafts.first_draft_slot + torch.arange(batch * nodes, device=device).view(batch, nodes)
        self.parents = torch.tensor(drafts.parents, dtype=torch.int32, device=device).expand(batch, nodes).contiguous()
        self.verify = {GDN: gdn_verify_slots_reference, MAMBA2: mamba2_verify_slots_reference}[drafts.layer.family]

    def _where(self) -> dict[str, Any]:
        parents = None if self.drafts.chain else self.parents
        return {"nodes": NodeSlots(self.drafts.slots[0], self.write, parents), "compute_dtype": torch.float64}

    def convolve(self, index: int) -> torch.Tensor:
        weights = {"weight": self.layer.weight, "bias": self.layer.bias, "activation": "silu"}
        x = self.drafts.inputs[0][0].double()
        return conv1d_verify_slots_reference(x, conv_states=self.conv_states[index], **weights, **self._where())

    def score(self, index: int, y: torch.Tensor) -> torch.Tensor:
        verify = partial(self.verify, states=States(self.states[index]), **self._where())
        rest = (tensor.double() for tensor in self.drafts.inputs[0][1:])
        return self.layer.score(verify, split(self.layer, y.double()), *rest)

    def commit(self, last: torch.Tensor, track: torch.Tensor) -> None:
        newest, tracked = (self.write.gather(1, node.clamp(min=0)[:, None].long())[:, 0] for node in (last, track))
        slots, track_slots = self.drafts.slots[0].long(), self.drafts.track_slots[0].long()
        for pool in (self.states, self.conv_states):
            pool[:, slots] = pool[:, newest]
            pool[:, track_slots[track >= 0]] = pool[:, tracked[track >= 0]]


def open_pools(layer: Layer, layers: int, slots: int, hollow: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """temporal [layers, slots, ...] and conv [layers, slots, dim, K-1], zeros."""
    shape = layer.shape
    sizes = ((*shape.temporal,), DTYPES[shape.state]), ((shape.conv_dim, CONV_WIDTH - 1), ACTIVATIONS)
    return tuple(
        torch.zeros(1, 1, *size, dtype=dtype, device=layer.device).expand(layers, slots, *size)
        if hollow
        else torch.zeros(layers, slots, *size, dtype=dtype, device=layer.device)
        for size, dtype in sizes
    )


def fill(step: Step, states: torch.Tensor, conv_states: torch.Tensor) -> None:
    """Start from these canonical slots, in SGLang's axis order."""
    step.states[:, : states.shape[1]] = states
    step.conv_states[:, : states.shape[1]] = conv_states
