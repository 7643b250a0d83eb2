"""The version of these kernels. The plugin refuses to start with kernels of another version than its own.

A module beside the families, without an import: `mamba_mtp_kernels` itself is a namespace and has no ``__init__.py``.
"""

__version__ = "0.1.0"
