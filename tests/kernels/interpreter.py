"""Triton's interpreter without work that shows nothing, which was half of the kernel tests' time; and with products
whose bits do not depend on their tile's size (`_products_in_order`).

* It replaces the names of `triton.language` for a launch, and again for every call of a device function in it, going
  through all there are each time: once a launch is enough.
* It computes every sum, difference and product of small integers a second time in int64 and compares: for an assertion
  that is made under ``debug`` alone, which the interpreter's options leave off.
* It builds its table of NumPy's types each time it looks one up.
* A block's type is made anew for every value, and a tuple's, which nobody asks for, at every step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy


def _types_once(core: ModuleType, semantic: Any) -> None:
    """A type, and what a tensor takes from it, once for all blocks that are alike; these are not made alike again."""
    make_alike = semantic.broadcast_impl_value
    make_block, make_tuple = core.block_type.__init__, core.tuple.__init__
    type_of_tuple = core._type_for_tuple_values

    @functools.cache
    def shape_and_size(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        blocks = element_ty.__dict__.setdefault("blocks", {})  # (pointers' types cannot be hashed)
        if sizes in blocks:
            self.__dict__.update(blocks[sizes])
        else:
            make_block(self, element_ty, list(sizes))
            blocks[sizes] = dict(self.__dict__)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_and_size(tuple(type.shape) if type.is_block() else ())

    def tuple_(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values, self._type = list(args), None
        else:
            make_tuple(self, args, type)

    def tuple_type(self: Any) -> Any:
        if self._type is None:
            self._type = type_of_tuple(self.values)
        return self._type

    def set_tuple_type(self: Any, type: Any) -> None:
        self._type = type

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return make_alike(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast
    core.block_type.__init__, core.tensor.__init__, core.tuple.__init__ = block_type, tensor, tuple_
    core.tuple.type = property(tuple_type, set_tuple_type)


def _products_in_order(builder: Any, handle: Any) -> None:
    """Sum an element's products one after the other, as tensor cores do for tiles of all sizes. NumPy's BLAS chooses by
    size, and on AVX2 its kernels differ in their sums: a state's bits then depend on who folds it. (Products of one
    column would still differ; no kernel has such.)"""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        a, b = (numpy.ascontiguousarray(factor.data, d.data.dtype) for factor in (a, b))
        return handle(numpy.einsum("...ij,...jk->...ik", a, b) + d.data, d.dtype.scalar)

    builder.create_dot = create_dot


def quicken() -> None:
    """Leave that work out, for this process, and put products in order."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    np_dtype = functools.cache(interpreter._get_np_dtype)
    address = numpy.dtype(numpy.uint64)
    interpreter._get_np_dtype = lambda dtype: address if dtype.scalar.is_ptr() else np_dtype(dtype.scalar)

    _types_once(tl.core, TritonSemantic)
    _products_in_order(interpreter.InterpreterBuilder, interpreter.TensorHandle)

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
