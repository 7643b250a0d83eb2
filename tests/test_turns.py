"""Cells that are dealt among the versions: each runs on one of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from .conftest import VERSIONS
from .turns import others_turn


def item(name: str, cell: str, *markers: pytest.MarkDecorator, **indices: int):
    found = {decorator.name: decorator.mark for decorator in markers}
    return SimpleNamespace(
        nodeid=f"tests/{name}[{cell}]",
        keywords=found,
        callspec=SimpleNamespace(id=cell, indices=indices),
        get_closest_marker=found.get,
    )


def dealt(items: list) -> dict[str, set[str]]:
    """What runs on which version."""
    return {version: {each.nodeid for each in items} - others_turn(items, version, VERSIONS) for version in VERSIONS}


@pytest.mark.parametrize("cells", [1, 2, 7])
def test_a_cell_runs_on_one_version(cells):
    items = [item("a.py::test", f"gdn-{i}", pytest.mark.in_turn) for i in range(cells)]
    runs = dealt(items)
    assert sorted(name for names in runs.values() for name in names) == sorted(each.nodeid for each in items)
    assert max(map(len, runs.values())) - min(map(len, runs.values())) <= 1


def test_what_shares_a_server_stays_together():
    marker = pytest.mark.in_turn("server")
    items = [item(f"a.py::test_{i}", f"{server}-{i}", marker, server=server) for i in range(3) for server in range(2)]
    runs = dealt(items)
    assert {frozenset(name.partition("[")[2][0] for name in names) for names in runs.values()} == {
        frozenset("0"),
        frozenset("1"),
    }


def test_no_server_is_started_for_what_runs_once_alone():
    marker = pytest.mark.in_turn("server")
    items = [item("a.py::test", f"{server}", marker, server=server) for server in range(2)]
    once = item("a.py::test_once", "1", marker, pytest.mark.once, server=1)
    for version in VERSIONS:
        others = others_turn([*items, once], version, VERSIONS)
        assert (once.nodeid in others) == (items[1].nodeid in others)


def test_others_are_not_dealt():
    left = [
        item("a.py::test", "gdn", pytest.mark.in_turn, getattr(pytest.mark, name)) for name in ("gpu", "slow", "once")
    ]
    items = [*left, item("a.py::test", "mamba2")]
    assert all(names == {"tests/a.py::test[gdn]", "tests/a.py::test[mamba2]"} for names in dealt(items).values())


def test_a_test_without_parameters_runs_on_all():
    bare = item("a.py::test", "", pytest.mark.in_turn)
    del bare.callspec
    assert all(names == {bare.nodeid} for names in dealt([bare]).values())
