"""What else an engine may be asked for, on a GPU (`gpu_engines`): data-parallel attention, expert parallel, the largest
trees, drafts of a second model, states of 16 bits, temperature, torch.compile. Activations are float32."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from . import logprobs, narrow
from .gpu_engines import VERSION, Cell, cells, check_engine, check_equal, check_states, parameter, stock_of
from .harness import STATE_BOUND, compare_states, token_differences
from .matrix import FAMILIES, IN_FULL, Case
from .ranks import IDLE_DRAFT_FAILS
from .sampling import drawn_otherwise, told_otherwise
from .spec import Result

pytestmark = pytest.mark.gpu


def _only(mode: str, families: Sequence[str] = FAMILIES) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(families, (mode,))


# -- data-parallel attention -----------------------------------------------------------------------------------------


def _data_parallel(mode: str, cache: str) -> list:
    idle_draft = () if VERSION == (0, 5, 17) else (pytest.mark.skip(reason=IDLE_DRAFT_FAILS),)
    marks = {"gdn": (), "mamba2": idle_draft}
    found = {family: Cell(Case(family, "nextn-chain", cache, mode), kind="data_parallel") for family in FAMILIES}
    return [parameter(cell, *marks[family]) for family, cell in found.items()]


def _say(what: str, result: Result, wanted: Result) -> list[str]:
    """The answers that differ, told."""
    lines = token_differences(result, wanted)
    told = "".join(f"\n      {line}" for line in lines)
    print(f"\n    {what}: {len(lines)} of {len(wanted.outcomes)} answers differ{told}", end="")
    return lines


@pytest.mark.parametrize(
    "cell", [*_data_parallel("replay", "rewind"), *_data_parallel("slots", "extra_buffer-overlap")]
)
def test_data_parallel(cell, engines):
    """Two ranks with requests of their own answer as one plain rank does, and every state is the one that it has after
    the same tokens, to 1e-5.

    Told besides, and not judged: which answers of the same two ranks without speculation are others than one plain
    rank's (SGLang's own: 0.5.17 has some with Mamba2, on a CPU too), and which of this engine are others than theirs.
    """
    result, one_rank = engines[cell]
    check_engine(cell, result)
    _say("without speculation, from one rank's", engines.beside(cell), one_rank)
    _say("this, from the same two ranks' without speculation", result, engines.beside(cell))
    differences = _say("this, from one rank's", result, one_rank)
    comparison = compare_states(result, STATE_BOUND)
    print(f"; {comparison.compared} states, worst {comparison.worst:.1e} ({comparison.worst_where})", end="")
    assert not differences, f"{len(differences)} requests differ:\n  " + "\n  ".join(differences)
    comparison.check()


@pytest.mark.parametrize("cell", _data_parallel("off", "extra_buffer-overlap"))
def test_data_parallel_without_the_plugin(cell, engines):
    """SGLang's own verify on two ranks: it answers everything, and what differs, of answers and states, is told, not
    judged: nothing of it is ours."""
    result, one_rank = engines[cell]
    check_engine(cell, result)
    _say("SGLang's verify, from the same two ranks' without speculation", result, engines.beside(cell))
    _say("SGLang's verify, from one rank's", result, one_rank)
    comparison = compare_states(result, STATE_BOUND)
    print(
        f"; {len(comparison.bad)} of {comparison.compared} states are off by more than {STATE_BOUND:.0e}, "
        f"worst {comparison.worst:.1e} ({comparison.worst_where})",
        end="",
    )


# -- experts of their own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", cells("nextn-tree", _only("replay", ["gdn"]), "rewind", kind="expert_parallel"))
def test_expert_parallel(cell, engines):
    """``--ep-size 2``: each of two ranks has half of the experts, and of everything else what two ranks have. Of the
    tiny models GDN's alone has experts."""
    check_equal(cell, engines)


# -- other drafts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        *cells("nextn-tree", _only("replay"), "rewind", kind="nodes64"),
        *cells("nextn-tree", _only("slots"), "no_buffer", kind="nodes64"),
    ],
)
def test_nodes64(cell, engines):
    """The largest tree there is room for in an ancestor mask: 11 levels of up to 8 nodes."""
    check_equal(cell, engines)


@pytest.mark.parametrize("cell", cells("standalone-chain", _only("replay"), "rewind", kind="standalone"))
def test_standalone(cell, engines):
    """A second model drafts on its own."""
    check_equal(cell, engines)


@pytest.mark.parametrize("cell", cells("eagle3-tree", _only("replay"), "rewind", kind="eagle3"))
def test_eagle3(cell, engines):
    """A second model drafts on the target's states."""
    check_equal(cell, engines)


SHOWN = FAMILIES if VERSION >= (0, 5, 19) else ("gdn",)
"""Those whose model shows its inner states, as DFLASH wants them: SGLang's Nemotron-H does from 0.5.19 on."""


@pytest.mark.parametrize("cell", cells("dflash-chain", _only("replay", SHOWN), "rewind", kind="dflash"))
def test_dflash(cell, engines):
    """Chains of 16 nodes at once, by a draft that knows the plain engine's answers (`foresight`)."""
    result = check_equal(cell, engines)
    print(f"; accept length {result.accept_length:.2f}", end="")
    assert result.accept_length > 3, "it knew too little"


# -- states of 16 bits -----------------------------------------------------------------------------------------------


def _narrow() -> list:
    found = [
        Cell(Case(family, narrow.ALGORITHM[family], "no_buffer", mode), kind="narrow", states=dtype)
        for family in FAMILIES
        for mode in IN_FULL
        for dtype in narrow.EPS
    ]
    return [parameter(cell) for cell in found]


@pytest.mark.parametrize("cell", _narrow())
def test_narrow(cell, engines):
    """``--mamba-ssm-dtype``: states are no farther from float32's than SGLang's own verify leaves them."""
    result, exact = engines[cell]
    check_engine(cell, result)
    narrow.check(result, engines[stock_of(cell)][0], exact, engines.beside(cell), cell.states)


# -- temperature -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        *cells("nextn-tree", _only("replay"), kind="sampled"),
        *cells("nextn-chain", _only("slots"), "no_buffer", kind="sampled"),
    ],
)
def test_sampled(cell, engines):
    """Drafts are accepted and tokens drawn from the target's probabilities, with seeds of the requests' own: the same
    tokens as with SGLang's verify, as likely as there, and the states of these."""
    result, stock = engines[cell][0], engines[stock_of(cell)][0]
    check_engine(cell, result)
    assert result.outcomes["drawn/a1"].tokens != result.outcomes["drawn/cold"].tokens, "nothing was drawn"
    assert drawn_otherwise(result, stock) == []
    worst = told_otherwise(result, stock)
    print(f"; log-probabilities, worst {worst:.1e}", end="")
    assert worst < logprobs.BOUND
    check_states(result)


# -- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", cells("nextn-tree", _only("replay"), "rewind", kind="compile"))
def test_compile(cell, engines):
    """``--enable-torch-compile``: the target's forward is compiled, in pieces or whole, and the same comes out."""
    result = check_equal(cell, engines)
    ours = [each for each in result.traced if "/sglang_mamba_mtp/" in each or "/mamba_mtp_kernels/" in each]
    print(f"; {len(result.traced)} functions compiled, {len(ours)} of them ours", *ours, sep="\n      ", end="")
    # Dynamo names a forward that it traced in one go after its own wrapper of it.
    whole = [each for each in result.traced if each.endswith("/torch/_dynamo/external_utils.py:inner")]
    assert whole or any("/srt/models/" in each for each in result.traced), "the model's forward was not compiled"
