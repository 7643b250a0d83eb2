"""What the CPU engine puts in place has a place in every version that is supported."""

from __future__ import annotations

import pytest

from sglang_mamba_mtp.cpu.patches import PATCHES, Patch

from .conftest import VERSIONS, sources_of
from .sources import Sources


def is_there(patch: Patch, sources: Sources) -> bool:
    """Whether the name that ``patch`` replaces exists."""
    owner, _, name = patch.attribute.rpartition(".")
    return name in sources.names(f"{patch.module}:{owner}" if owner else patch.module)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target)
def test_every_patch_has_a_target(patch):
    there = [each for each in VERSIONS if is_there(patch, sources_of(each))]
    modules = [each for each in VERSIONS if sources_of(each).module(patch.module) is not None]
    if patch.create:  # the source has it for other devices; the module may have come later
        assert there == modules and modules == list(VERSIONS)[-len(modules) :]
    elif patch.optional:
        assert 0 < len(there) < len(VERSIONS), f"found in {there}"
    else:  # where there is no module there is nothing that calls it
        assert there == modules and there
