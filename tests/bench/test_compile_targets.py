"""compile_targets.py compiles every kernel that is launched: whoever adds one is told here. Nothing is compiled."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once  # nothing of SGLang is in it

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels"


def launches(source: str, module: str) -> set[str]:
    """What `module` of the kernels (a dotted name) calls as kernel[grid](...), as module.kernel where it is defined."""
    tree = ast.parse(source)
    package = module.split(".")
    home: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            there = ".".join([*package[: -node.level], *filter(None, [node.module])])
            home |= {alias.asname or alias.name: there for alias in node.names}
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = {ast.unparse(func.value) for func in calls if isinstance(func, ast.Subscript)}
    return {f"{home.get(name, module)}.{name}" for name in names}


def launched_kernels() -> set[str]:
    found: set[str] = set()
    for path in KERNELS.rglob("*.py"):
        found |= launches(path.read_text(), ".".join(path.relative_to(KERNELS).with_suffix("").parts))
    return found


def compiled_kernels() -> set[str]:
    """Of the cases, asked of them in a process whose Triton does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.compile_targets", "--kernels"]
    asked = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert asked.returncode == 0, asked.stderr
    return {line.split()[-1] for line in asked.stdout.splitlines()}


def test_a_launch_is_seen():
    source = "from .b import _b\nfrom ..c.d import e as _e\n"
    source += "_a[launch_grid(n)](x)\n_b[(1,)](x)\n_e[grid](x)\ny[0] = g(x)\nh(y[0])\n"
    assert launches(source, "p.a") == {"p.a._a", "p.b._b", "c.d._e"}


def test_every_kernel_that_is_launched_is_compiled():
    launched = launched_kernels()
    assert len(launched) > 15
    assert launched - compiled_kernels() == set()
