"""What torch.compile compiles in an engine, where it is not switched off: Dynamo's own notes."""

from __future__ import annotations

LIMIT = 1 << 14
"""Compilations that are noted; Dynamo forgets all but 64 otherwise."""


def watch() -> None:
    """Note them from now on."""
    from torch._dynamo import utils

    utils.set_compilation_metrics_limit(LIMIT)


def functions() -> list[str]:
    """The functions, or parts of them, that became graphs with something in them: "file:name", each once."""
    from torch._dynamo import utils

    compiled = [each for each in utils.get_compilation_metrics() if each.graph_op_count]
    return sorted({f"{each.co_filename}:{each.co_name}" for each in compiled})
