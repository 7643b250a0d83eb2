"""Triton's interpreter without work that shows nothing, which was half of the kernel tests' time.

* It replaces the names of `triton.language` for a launch, and again for every call of a device function in it, going
  through all there are each time: once a launch is enough.
* It computes every sum, difference and product of small integers a second time in int64 and compares: for an assertion
  that is made under ``debug`` alone, which the interpreter's options leave off.
* It builds its table of NumPy's types each time it looks one up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy


def quicken() -> None:
    """Leave that work out, for this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    np_dtype = functools.cache(interpreter._get_np_dtype)
    address = numpy.dtype(numpy.uint64)
    interpreter._get_np_dtype = lambda dtype: address if dtype.scalar.is_ptr() else np_dtype(dtype.scalar)

    replace_names = interpreter._patch_lang
    replaced: set[frozenset[ModuleType]] = set()

    @functools.cache
    def seen_from(function: Callable[..., Any]) -> frozenset[ModuleType]:
        """Where a function finds the language: the modules whose names are replaced for it."""
        return frozenset(x for x in function.__globals__.values() if x is tl or x is tl.core)

    def for_a_launch(function: Callable[..., Any]) -> Any:
        replaced.clear()
        replaced.add(seen_from(function))
        return replace_names(function)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A device function's."""
        modules = seen_from(self.fn)
        if modules not in replaced:
            replaced.add(modules)
            replace_names(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = for_a_launch
    interpreter.InterpretedFunction.__call__ = call
