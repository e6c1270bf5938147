"""Vectors for `numba_kernel`: sixteen numbers that compiled code holds and works on together. Ours.

Written by hand, as loops that the compiler makes vectors of come with checks and remainders that take as long as a
short row, and add up in an order of the compiler's. These add lane by lane on every processor: on wide registers in
one instruction, on narrower ones in two or four.

numba keeps what it compiled as long as the kernel's own file is the same: that one names a hash of this one.
"""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.extending import lower_builtin, models, register_model, type_callable

LANES = 16
"""Numbers of one vector."""


intrinsic: Any = extending.intrinsic
"""Makes of a function that gives a type and writes instructions one that compiled code calls, without the `typing`."""


class _Vector(types.Type):
    def __init__(self, of: types.Type) -> None:
        self.of = of
        super().__init__(f"vector of {LANES} {of}")


_F4, _F8 = _Vector(types.float32), _Vector(types.float64)
_NUMBERS = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_BITS = ir.VectorType(ir.IntType(32), LANES)
_LONG = ir.VectorType(ir.IntType(64), LANES)


@register_model(_Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, vector: _Vector) -> None:
        super().__init__(dmm, vector, ir.VectorType(_NUMBERS[vector.of], LANES))


def _operate(symbol: Callable[..., Any], instruction: str) -> None:
    @type_callable(symbol)
    def _(context: Any) -> Any:
        return lambda a, b: a if isinstance(a, _Vector) and a == b else None

    lower_builtin(symbol, _Vector, _Vector)(lambda context, builder, sig, args: getattr(builder, instruction)(*args))


for _symbol, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"),
                               (operator.truediv, "fdiv")):  # fmt: skip
    _operate(_symbol, _instruction)


def _all(value: ir.Value, builder: ir.IRBuilder) -> ir.Value:
    """A vector that holds a number in every lane."""
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, one, ir.Constant(_BITS, [0] * LANES))


def _halve(vector: ir.Value, builder: ir.IRBuilder, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """One number of all lanes, by halves."""
    n = LANES
    while n > 1:
        n //= 2
        halves = (range(n), range(n, 2 * n))
        low, high = (
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(ir.IntType(32), n), list(half)))
            for half in halves
        )
        vector = join(low, high)
    return builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))


def _number_at(context: Any, builder: ir.IRBuilder, array: types.Array, value: ir.Value, index: ir.Value) -> ir.Value:
    """The address of a number in an array."""
    return builder.gep(context.make_array(array)(context, builder, value).data, [index])


def _at(context: Any, builder: ir.IRBuilder, array: types.Array, value: ir.Value, index: ir.Value) -> ir.Value:
    """The address of a vector in an array."""
    vector = ir.VectorType(_NUMBERS[array.dtype], LANES)
    return builder.bitcast(_number_at(context, builder, array, value, index), vector.as_pointer())


@intrinsic
def load(typing: Any, array: Any, index: Any) -> Any:
    """The lanes from an index on."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.load(_at(context, builder, sig.args[0], *args), align=4)

    return _Vector(array.dtype)(array, types.int64), emit


@intrinsic
def store(typing: Any, array: Any, index: Any, vector: Any) -> Any:
    """Puts the lanes from an index on."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store(args[2], _at(context, builder, sig.args[0], *args[:2]), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), emit


@intrinsic
def spread(typing: Any, number: Any) -> Any:
    """A number in every lane."""
    return _Vector(number)(number), lambda context, builder, sig, args: _all(args[0], builder)


@intrinsic
def take(typing: Any, array: Any, index: Any) -> Any:
    """The number at an index that is not negative, which numba's own way would ask."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.load(_number_at(context, builder, sig.args[0], *args))

    return array.dtype(array, types.int64), emit


@intrinsic
def call_for(typing: Any, array: Any, index: Any) -> Any:
    """Has the line of the cache brought that holds an index, which may lie behind the array."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        name = "llvm.prefetch.p0i8"
        function = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [byte, number, number, number]), name
        )
        address = builder.bitcast(_number_at(context, builder, sig.args[0], *args), byte)
        builder.call(function, [address, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), emit


@intrinsic
def put(typing: Any, array: Any, index: Any, number: Any) -> Any:
    """Puts a number at an index that is not negative."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store(args[2], _number_at(context, builder, sig.args[0], *args[:2]))
        return context.get_dummy_value()

    return types.void(array, types.int64, number), emit


@intrinsic
def ramp(typing: Any) -> Any:
    """0, 1, 2, ..."""
    places = ir.Constant(ir.VectorType(ir.FloatType(), LANES), [float(lane) for lane in range(LANES)])
    return _F4(), lambda context, builder, sig, args: places


@intrinsic
def fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """A * b + c, rounded once where the processor can."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        kind = args[0].type
        name = f"llvm.fmuladd.v{LANES}f{32 if kind.element == ir.FloatType() else 64}"
        function = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(kind, [kind] * 3), name
        )
        return builder.call(function, args)

    return a(a, a, a), emit


@intrinsic
def larger(typing: Any, a: Any, b: Any) -> Any:
    """The larger one in each lane; b where one of them is NaN."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return a(a, a), emit


@intrinsic
def choose(typing: Any, a: Any, b: Any, chosen: Any, other: Any) -> Any:
    """In each lane `chosen` where a >= b, else, and where one of them is NaN, `other`."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.select(builder.fcmp_ordered(">=", *args[:2]), *args[2:])

    return chosen(a, a, chosen, chosen), emit


@intrinsic
def positive(typing: Any, vector: Any) -> Any:
    """Without signs."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        cut = _all(ir.Constant(ir.IntType(32), 0x7FFFFFFF), builder)
        return builder.bitcast(builder.and_(builder.bitcast(args[0], _BITS), cut), args[0].type)

    return vector(vector), emit


@intrinsic
def raise_exponent(typing: Any, vector: Any, by: Any) -> Any:
    """Times two to the power of the whole number in the lowest bits of `by`."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        bits, by = (builder.bitcast(arg, _BITS) for arg in args)
        by = builder.shl(by, _all(ir.Constant(ir.IntType(32), 23), builder))
        return builder.bitcast(builder.add(bits, by), args[0].type)

    return vector(vector, vector), emit


@intrinsic
def exponent(typing: Any, vector: Any) -> Any:
    """The power of two of positive float64 numbers: x = fraction(x) * 2**exponent(x)."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        bits = builder.lshr(builder.bitcast(args[0], _LONG), _all(ir.Constant(ir.IntType(64), 52), builder))
        return builder.sitofp(builder.sub(bits, _all(ir.Constant(ir.IntType(64), 1023), builder)), args[0].type)

    return _F8(_F8), emit


@intrinsic
def fraction(typing: Any, vector: Any) -> Any:
    """What positive float64 numbers have beside their `exponent`, 1 to 2."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        bits = builder.bitcast(args[0], _LONG)
        bits = builder.and_(bits, _all(ir.Constant(ir.IntType(64), (1 << 52) - 1), builder))
        bits = builder.or_(bits, _all(ir.Constant(ir.IntType(64), 1023 << 52), builder))
        return builder.bitcast(bits, args[0].type)

    return _F8(_F8), emit


@intrinsic
def widen(typing: Any, vector: Any) -> Any:
    """In float64."""
    wide = ir.VectorType(ir.DoubleType(), LANES)
    return _F8(_F4), lambda context, builder, sig, args: builder.fpext(args[0], wide)


@intrinsic
def total(typing: Any, vector: Any) -> Any:
    """The sum of all lanes."""
    return vector.of(vector), lambda context, builder, sig, args: _halve(args[0], builder, builder.fadd)


@intrinsic
def highest(typing: Any, vector: Any) -> Any:
    """The largest of all lanes, of which none is NaN."""

    def emit(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _halve(args[0], builder, lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))

    return vector.of(vector), emit
