"""How a surface of SGLang is described, found in the installed version and checked; `surfaces` lists them.

SGLang is imported inside functions only: `env_report` must be able to load this module where SGLang is missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any

from ..errors import MtpError


@dataclass(frozen=True)
class Surface:
    """A function or method of SGLang that we wrap, override or call.

    Attributes
        path: ``module:qualname``.
        parameters: the parameter lists known to us, oldest first; the surface must have exactly one of them.
        former: where older versions have it instead, ``module:qualname`` each.
        later: older versions have nothing of the kind, and nothing is needed there.
    """

    path: str
    parameters: tuple[tuple[str, ...], ...]
    former: tuple[str, ...] = ()
    later: bool = False

    @property
    def location(self) -> str:
        """Where the installed SGLang has it: the first path whose module there is; ``path`` if there is none."""
        if not self.former:
            return self.path
        return next((path for path in (self.path, *self.former) if _is_there(path.partition(":")[0])), self.path)

    @property
    def dotted(self) -> str:
        """The spelling SGLang's hook registry takes."""
        return self.location.replace(":", ".")

    def resolve(self) -> tuple[Any, str, Any]:
        """Return ``(owner, name, raw attribute)``; the attribute is not bound, a classmethod stays a classmethod.

        Raises
            MtpError: the module or the attribute does not exist.
        """
        location = self.location
        module_name, _, qualname = location.partition(":")
        try:
            owner: Any = importlib.import_module(module_name)
        except ImportError as error:
            raise MtpError(f"SGLang has no module {module_name} that can be imported ({error})") from error
        *parents, name = qualname.split(".")
        for parent in parents:
            try:
                owner = getattr(owner, parent)
            except AttributeError:
                raise MtpError(f"SGLang has no {parent} in {module_name} (wanted: {location})") from None
        try:
            return owner, name, inspect.getattr_static(owner, name)
        except AttributeError:
            raise MtpError(f"SGLang has no {name} in {location.rpartition('.')[0] or module_name} any more") from None

    def is_needed(self) -> bool:
        """False where it came later than the installed SGLang."""
        if not self.later:
            return True
        try:
            self.resolve()
        except MtpError:
            return False
        return True

    def check(self) -> None:
        """Check that the surface exists, if it is needed, and takes the parameters we expect.

        Raises
            MtpError: it does not; the message shows both lists.
        """
        if not self.is_needed():
            return
        _, _, attribute = self.resolve()
        self.compare(tuple(inspect.signature(function_of(attribute)).parameters))

    def compare(self, found: tuple[str, ...]) -> None:
        """Check ``found``, the parameters it takes.

        Raises
            MtpError: they are none of ``parameters``.
        """
        if found not in self.parameters:
            expected = " or ".join(f"({', '.join(known)})" for known in self.parameters)
            raise MtpError(f"{self.path} takes ({', '.join(found)}); expected {expected}")


def function_of(attribute: Any) -> Any:
    """What a raw attribute calls: of a classmethod or staticmethod the function in it."""
    return attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # of a package above it
        return False


@dataclass(frozen=True)
class Names:
    """Names of a module, or attributes of a class's instances, that we read, set or call as they are.

    Attributes
        owner: ``module``, or ``module:Class``.
        names: the names.
    """

    owner: str
    names: tuple[str, ...]
