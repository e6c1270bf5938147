"""How numba compiles `numba_kernel`: for one signature, kept on disk, its tasks shared by torch's own threads. Ours.

numba's own threads would be a second pool beside torch's, abort when two Python threads call at once, or die after a
fork. Python's threads compete with torch's for the processor: torch's spin while they wait for work, and a pass over
short texts is done before they sleep.
"""

import contextlib
import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, compiler, targetconfig

from attnscope.core.measures.backends.numba_vectors import intrinsic

_I64, _I32, _POINTER = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
_TASK = ir.FunctionType(ir.VoidType(), [_POINTER])
_PARALLEL = ir.FunctionType(ir.VoidType(), [_TASK.as_pointer(), _POINTER, _I32, _I32])


def compile_for(signature: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compiles a function for a signature and keeps that on disk; where that fails, for this process alone.

    It fails where no folder may be written or the disk is full, and where what is kept is damaged, which is removed.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any]
        try:
            compiled = njit(signature, nogil=True, cache=True, error_model="numpy")(function)
        except Exception:
            with contextlib.suppress(Exception):
                kept = Path(str(njit(cache=True)(function).stats.cache_path))
                for path in kept.glob(f"{Path(function.__code__.co_filename).stem}.{function.__name__}-*"):
                    path.unlink()
            compiled = njit(signature, nogil=True, error_model="numpy")(function)
        return compiled

    return decorate


@cache
def parallel_address() -> int:
    """Where GOMP_parallel lies, by which compilers have the threads of OpenMP call a function; 0 where there is none.

    Of the OpenMP that torch computes with, once torch is loaded: libgomp, or LLVM's, which has it too.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return 0


@intrinsic
def share(typing: Any, function: Any, parallel: Any, n_shares: Any, first: Any, last: Any, given: Any) -> Any:
    """Calls `function(first, last, *given)` for each of `n_shares` parts of a range.

    Which thread makes which call is left to chance.

    Args:
        typing: numba's.
        function: To be compiled; returns nothing.
        parallel: `parallel_address`, or 0: this thread makes all calls.
        n_shares: How many parts, and threads to ask for; at least 1.
        first: Where the range begins.
        last: Where it ends.
        given: A tuple of what all calls get.

    Returns:
        How many calls failed.
    """
    called = types.void(types.int64, types.int64, *given.types)

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        _, address, *numbers, values = args
        inner = _compile_into(context, function.dispatcher.py_func, called)
        # The share that is next, how many failed, how many there are, where the range begins and ends.
        layout = ir.LiteralStructType([_I64] * 5 + [context.get_value_type(part) for part in given.types])
        data = cgutils.alloca_once(builder, layout)
        for place, value in enumerate([_I64(0), _I64(0), *numbers, *cgutils.unpack_tuple(builder, values)]):
            builder.store(value, cgutils.gep_inbounds(builder, data, 0, place))
        task = ir.Function(builder.module, _TASK, f"{builder.function.name}.share")
        task.linkage = "internal"
        _emit_task(context, task, layout, inner, called)
        pointer = builder.bitcast(data, _POINTER)
        with builder.if_else(builder.icmp_signed("==", address, _I64(0))) as (alone, together):
            with alone:
                builder.call(task, [pointer])
            with together:
                threads = builder.inttoptr(address, _PARALLEL.as_pointer())
                builder.call(threads, [task, pointer, builder.trunc(numbers[0], _I32), _I32(0)])
        return builder.load(cgutils.gep_inbounds(builder, data, 0, 1))

    return types.int64(function, *[types.int64] * 4, given), emit


def _compile_into(context: Any, function: Callable[..., Any], signature: Any) -> Any:
    """Compiles a function as part of the one at hand: compiled on its own, it would be optimised twice."""
    flags = targetconfig.ConfigStack().top().copy()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    library = context.active_code_library
    return compiler.compile_internal(
        context.typing_context, context, library, function, signature.args, signature.return_type, flags, locals={}
    )


def _emit_task(context: Any, task: ir.Function, layout: ir.LiteralStructType, inner: Any, called: Any) -> None:
    """What a thread does: takes the next share as long as there is one."""
    builder = ir.IRBuilder(task.append_basic_block("entry"))
    data = builder.bitcast(task.args[0], layout.as_pointer())
    at = [cgutils.gep_inbounds(builder, data, 0, place) for place in range(len(layout.elements))]
    n_shares, start, stop, *values = [builder.load(pointer) for pointer in at[2:]]
    take, work, failed, done = (task.append_basic_block(name) for name in ("take", "work", "failed", "done"))
    builder.branch(take)
    builder.position_at_end(take)
    mine = builder.atomic_rmw("add", at[0], _I64(1), "seq_cst")
    builder.cbranch(builder.icmp_signed("<", mine, n_shares), work, done)
    builder.position_at_end(work)
    length = builder.sub(stop, start)
    edges = [
        builder.add(start, builder.sdiv(builder.mul(length, share), n_shares))
        for share in (mine, builder.add(mine, _I64(1)))
    ]
    status, _ = context.call_internal_no_propagate(builder, inner.fndesc, called, [*edges, *values])
    builder.cbranch(status.is_error, failed, take)
    builder.position_at_end(failed)
    builder.atomic_rmw("add", at[1], _I64(1), "seq_cst")
    builder.branch(take)
    builder.position_at_end(done)
    builder.ret_void()
