"""The pool's module imports SGLang, which needs the CPU engine's ops where there is no GPU."""

from sglang_mamba_mtp import cpu

if cpu.needed():
    cpu.install()
