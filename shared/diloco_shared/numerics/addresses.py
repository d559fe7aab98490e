"""Memory by its address, for compiled passes over what is far larger than any cache.

A pass takes as long as its bytes take to come and go, and an ordinary store first reads the line
that it overwrites. Here whole lines are written without being read: a third of the time, measured
on a Xeon. These are LLVM's non-temporal stores; a processor that has none stores as usual.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from diloco_shared.numerics.compiled import kernel

LINE = 64  # bytes; processors with lines of 128 write two at a time
WORDS = LINE // 4


def _typed_bytes_at(_context: Any, address: Any, size: Any) -> Any:
    kind = types.Array(types.uint8, 1, "C", readonly=True)

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        made: Any = arrayobj  # untyped
        array = made.make_array(kind)(context, builder)
        one = context.get_constant(types.intp, 1)
        made.populate_array(
            array,
            data=builder.inttoptr(args[0], array.data.type),
            shape=[args[1]],
            strides=[one],
            itemsize=one,
            meminfo=None,
        )
        return array._getvalue()

    return kind(types.uint64, types.intp), emit


bytes_at: Any = intrinsic(_typed_bytes_at)  # so many bytes at an address, as an array


def _typed_move(_context: Any, source: Any, target: Any, lines: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), WORDS).as_pointer()
        source, target = (builder.inttoptr(address, line) for address in args[:2])
        nontemporal = builder.module.add_metadata([ir.IntType(32)(1)])
        with cgutils.for_range(builder, args[2]) as loop:
            words = builder.load(builder.gep(source, [loop.index]), align=4)
            store = builder.store(words, builder.gep(target, [loop.index]), align=LINE)
            store.set_metadata("nontemporal", nontemporal)
        return context.get_dummy_value()

    return types.void(source, target, lines), emit


_move: Any = intrinsic(_typed_move)  # so many lines to where a line begins, past the cache


def _typed_fence(_context: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


# What was written past the cache is seen by other threads before anything written later. Every
# pass ends with it.
fence: Any = intrinsic(_typed_fence)


@kernel
def store(values_B: Any, out_B: Any) -> None:
    """Copy between arrays of one kind what is not read again soon; either may begin anywhere."""
    target, size = out_B.ctypes.data, out_B.itemsize
    head = min(np.int64((-target) % LINE) // size, out_B.size)
    lines = (out_B.size - head) * size // LINE
    for i in range(head):
        out_B[i] = values_B[i]
    _move(values_B[head:].ctypes.data, target + size * head, lines)
    for i in range(head + lines * LINE // size, out_B.size):
        out_B[i] = values_B[i]
