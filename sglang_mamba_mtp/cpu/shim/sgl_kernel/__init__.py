"""Stands in for the `sgl_kernel` wheel where it cannot load; see sglang_mamba_mtp/cpu/stub.py.

This folder's parent is put in front of `sys.path` (and PYTHONPATH) by `sglang_mamba_mtp.cpu.install()`, so that the
processes SGLang spawns find this package before any plugin code of theirs has run.
"""

import sys

from sglang_mamba_mtp.cpu.stub import fill

fill(sys.modules[__name__])
