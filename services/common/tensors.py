"""numpy ⇄ `tetrarch.common.v1.Tensor`: the only place where tensor bytes are packed.

Invariant: data is little-endian, row-major and contiguous, and its length equals the product of the shape
times the element size; anything else is refused.
"""

from __future__ import annotations

import math

import numpy as np
from tetrarch.common.v1 import tensor_pb2

from services.common.errors import invalid_field

_TO_PROTO = {
    "bool": tensor_pb2.DATA_TYPE_BOOL,
    "uint8": tensor_pb2.DATA_TYPE_UINT8,
    "int32": tensor_pb2.DATA_TYPE_INT32,
    "int64": tensor_pb2.DATA_TYPE_INT64,
    "float16": tensor_pb2.DATA_TYPE_FLOAT16,
    "bfloat16": tensor_pb2.DATA_TYPE_BFLOAT16,
    "float32": tensor_pb2.DATA_TYPE_FLOAT32,
    "float64": tensor_pb2.DATA_TYPE_FLOAT64,
}
_TO_NAME = {value: name for name, value in _TO_PROTO.items()}


def dtype_to_proto(name: str) -> tensor_pb2.DataType.ValueType:
    """DataType of a dtype name such as "float32"."""
    if name not in _TO_PROTO:
        raise invalid_field("dtype", name, f"use one of {', '.join(_TO_PROTO)}")
    return _TO_PROTO[name]


def dtype_name(data_type: tensor_pb2.DataType.ValueType) -> str:
    """dtype name of a DataType."""
    if data_type not in _TO_NAME:
        raise invalid_field("data_type", data_type, "it is not a known element type")
    return _TO_NAME[data_type]


def to_proto(array: np.ndarray) -> tensor_pb2.Tensor:
    """Packs an array of any shape. bfloat16 has no numpy dtype and cannot come from here."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return tensor_pb2.Tensor(data_type=dtype_to_proto(array.dtype.name), shape=array.shape, data=little.tobytes())


def to_numpy(tensor: tensor_pb2.Tensor) -> np.ndarray:
    """Read-only view of the message's bytes, in the message's shape."""
    name = dtype_name(tensor.data_type)
    if name == "bfloat16":
        raise invalid_field("data_type", name, "numpy has no bfloat16; keep it as bytes")
    dtype = np.dtype(name).newbyteorder("<")
    expected = math.prod(tensor.shape) * dtype.itemsize
    if len(tensor.data) != expected:
        raise invalid_field(
            "tensor.data", f"{len(tensor.data)} bytes", f"shape {list(tensor.shape)} of {name} needs {expected}"
        )
    return np.frombuffer(tensor.data, dtype=dtype).reshape(tuple(tensor.shape))
