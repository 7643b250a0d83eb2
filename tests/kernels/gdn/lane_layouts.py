"""Compile for sm_90 (no GPU needed) the kernel that counts on one element a lane, and show how its tensors lie.

python -m tests.kernels.gdn.lane_layouts      # the layouts of what its instructions take and give
"""

from __future__ import annotations

import os
import re
import sys

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

from ..dependent_ptx import gdn


def layouts(ttgir: str) -> set[str]:
    """Of all tensors that an instruction written by hand takes or gives."""
    named = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.MULTILINE))
    found = re.findall(r"tt\.elementwise_inline_asm .*", ttgir)
    return {named[name] for line in found for name in re.findall(r"tensor<32x\w+, (#\w+)>", line)}


def main() -> int:
    for nodes, keys in ((4, 32), (8, 32), (16, 64)):
        for layout in sorted(layouts(gdn(True, 0, nodes=nodes, keys=keys).asm["ttgir"])):
            print(layout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
