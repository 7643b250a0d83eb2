"""What of the tests marked ``in_turn`` runs on which SGLang version.

A test with many cells asks the same of every version, and takes long. Its cells are dealt among the versions, as cards
are: what a version does is asked of all of them in some cells, and each cell is asked of one.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence

import pytest

ELSEWHERE = frozenset({"gpu", "slow"})
"""Markers of tests that are chosen in another way. What is marked ``once`` is too, but where a parameter is named:
no server is started on the newest version for such a test alone."""


def others_turn(items: Iterable[pytest.Item], version: str, versions: Sequence[str]) -> set[str]:
    """Node ids of those whose turn it is not on ``version``.

    A cell is a test's parameters, or, of ``in_turn(name)``, a value of that parameter in whichever tests have it, as
    tests do that share a server. A test without parameters runs on all versions. The order they are dealt in has
    nothing to do with what they are.
    """
    dealt: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        marker = item.get_closest_marker("in_turn")
        if marker is None or ELSEWHERE & item.keywords.keys() or ("once" in item.keywords and not marker.args):
            continue
        if not hasattr(item, "callspec"):  # one cell: of a file that is dealt as a whole
            continue
        of, cell = item.nodeid.partition("[")[0], item.callspec.id
        if marker.args:
            of, cell = marker.args[0], str(item.callspec.indices[marker.args[0]])
        dealt[of][cell].append(item.nodeid)
    others: set[str] = set()
    for of, cells in dealt.items():
        for turn, cell in enumerate(sorted(cells, key=_order), _order(of)):
            if versions[turn % len(versions)] != version:
                others.update(cells[cell])
    return others


def _order(text: str) -> int:
    return zlib.crc32(text.encode())
