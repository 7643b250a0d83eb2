"""Argument checks shared by the launchers: each names the argument and prints the value it met."""

from __future__ import annotations

from collections.abc import Sequence

import torch

INDEX_DTYPES = (torch.int32, torch.int64)


def check_shape(name: str, tensor: torch.Tensor, shape: Sequence[int | None]) -> None:
    """Raise ValueError unless `tensor` has this shape; None stands for any size."""
    actual = tuple(tensor.shape)
    if len(actual) != len(shape) or any(
        want is not None and want != got for got, want in zip(actual, shape, strict=True)
    ):
        raise ValueError(f"{name}: shape {actual}, expected {tuple(shape)}")


def check_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Raise TypeError unless the dtype of `tensor` is one of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: dtype {tensor.dtype}, expected one of {tuple(dtypes)}")


def check_inner_contiguous(name: str, tensor: torch.Tensor, dims: int = 1) -> None:
    """Raise ValueError unless the last `dims` dimensions of `tensor` are laid out without gaps, row-major."""
    expected = 1
    for axis in range(tensor.dim() - 1, tensor.dim() - 1 - dims, -1):
        if tensor.shape[axis] != 1 and tensor.stride(axis) != expected:
            raise ValueError(
                f"{name}: strides {tensor.stride()} for shape {tuple(tensor.shape)}, last {dims} must be contiguous"
            )
        expected *= tensor.shape[axis]


def check_index(name: str, tensor: torch.Tensor, length: int | None) -> None:
    """Raise unless `tensor` is a contiguous int32 or int64 vector of this length (None: any)."""
    check_shape(name, tensor, (length,))
    check_dtype(name, tensor, INDEX_DTYPES)
    check_inner_contiguous(name, tensor)


def check_same_device(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all tensors given (None is skipped) lie on one device."""
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(
            "tensors on several devices: " + ", ".join(f"{name} on {dev}" for name, dev in devices.items())
        )
