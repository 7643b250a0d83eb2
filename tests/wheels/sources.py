"""Reads what an SGLang wheel holds from its sources, without importing anything of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """The sources below ``root``, the folder that holds the package ``sglang``. Modules are parsed when asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = cache(self._module)
        self.names = cache(self._names)

    def text(self, module: str) -> str | None:
        """The source of ``module``, or None if there is none."""
        stem = self.root.joinpath(*module.split("."))
        return next(
            (file.read_text() for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.exists()), None
        )

    def _module(self, name: str) -> ast.Module | None:
        text = self.text(name)
        return None if text is None else ast.parse(text, name)

    def find(self, path: str) -> ast.AST | None:
        """The class or function at ``module:qualname``, or the module; None if there is none.

        A method may be inherited, from a class of the wheel.
        """
        name, _, qualname = path.partition(":")
        node: ast.AST | None = self.module(name)
        for part in qualname.split(".") if qualname else ():
            if node is None:
                return None
            node = self._member(name, node, part)
        return node

    def _member(self, module: str, owner: ast.AST, name: str) -> ast.AST | None:
        for node in _statements(owner):
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return node
        if isinstance(owner, ast.ClassDef):
            for base_module, base in self._bases(module, owner):
                found = self._member(base_module, base, name)
                if found is not None:
                    return found
        return None

    def _bases(self, module: str, owner: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """The classes ``owner`` extends, with their modules, as far as the wheel has them."""
        tree = self.module(module)
        for base in owner.bases:
            if tree is None or not isinstance(base, ast.Name):
                continue
            for node in _statements(tree):
                if isinstance(node, ast.ClassDef) and node.name == base.id:
                    yield module, node
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        found = (
                            self.find(f"{node.module}:{alias.name}")
                            if (alias.asname or alias.name) == base.id
                            else None
                        )
                        if isinstance(found, ast.ClassDef):
                            yield node.module, found

    def parameters(self, path: str) -> tuple[str, ...] | None:
        """The parameters of the function at ``path``, as `inspect.signature` names them; None if there is none."""
        node = self.find(path)
        if not isinstance(node, Function):
            return None
        given = node.args
        stars = [[star] if star else [] for star in (given.vararg, given.kwarg)]
        return tuple(arg.arg for arg in (*given.posonlyargs, *given.args, *stars[0], *given.kwonlyargs, *stars[1]))

    def _names(self, owner: str) -> frozenset[str]:
        """The names of a module, or of a class and its instances: ``module`` or ``module:Class``. Empty if it is not
        there."""
        node = self.find(owner)
        if isinstance(node, ast.Module):
            return frozenset(_bound(node))
        if not isinstance(node, ast.ClassDef):
            return frozenset()
        names = set(_bound(node)) | set(_set_on_self(node))
        for base_module, base in self._bases(owner.partition(":")[0], node):
            names |= self.names(f"{base_module}:{base.name}")
        return frozenset(names)

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The server arguments: fields of `ServerArgs`, which later versions assemble from one class a namespace."""
        folder = self.root / "sglang/srt/arg_groups/fields"
        namespaces = [f"sglang.srt.arg_groups.fields.{file.stem}" for file in sorted(folder.glob("[!_]*.py"))]
        names = set(self.names("sglang.srt.server_args:ServerArgs"))
        for module in namespaces:
            tree = self.module(module)
            assert tree is not None
            names |= {name for node in tree.body if isinstance(node, ast.ClassDef) for name in _bound(node)}
        return frozenset(names)


def _statements(owner: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module or class, those inside its conditions included, not those of functions."""
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler | ast.For):
            yield from _statements(node)


def _bound(owner: ast.AST) -> Iterator[str]:
    for node in _statements(owner):
        if isinstance(node, ast.ClassDef | Function):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _set_on_self(owner: ast.ClassDef) -> Iterator[str]:
    for method in _statements(owner):
        if isinstance(method, Function) and method.args.args:
            this = method.args.args[0].arg
            for node in ast.walk(method):
                stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if stored and isinstance(node.value, ast.Name) and node.value.id == this:
                    yield node.attr
