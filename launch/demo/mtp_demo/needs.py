"""``PYTHON needs.py``: can this interpreter, given with --python, run SGLang and the demo? Says what to install.

Standard library of any Python from 3.6 only: it runs before anything is known of the interpreter.
"""

import importlib.util
import sys

#: Modules that SGLang brings along and the demo imports too.
MODULES = ("sglang", "torch", "psutil", "tokenizers")


def complaint(version=sys.version_info, find=importlib.util.find_spec):
    """Why this interpreter will not do, or None."""
    if not (3, 11) <= tuple(version[:2]) <= (3, 13):
        return f"is Python {version[0]}.{version[1]}; 3.11, 3.12 or 3.13 is needed"
    missing = [name for name in MODULES if find(name) is None]
    if "sglang" in missing:
        return (
            f"has no SGLang; give an interpreter that has it, install it ({sys.executable} -m pip install sglang), or "
            "leave --python away: an environment is then set up in .venvs"
        )
    if missing:
        return f"lacks {', '.join(missing)}; install with: {sys.executable} -m pip install {' '.join(missing)}"
    return None


if __name__ == "__main__":
    found = complaint()
    if found is not None:
        sys.exit("--python: " + sys.executable + " " + found)
