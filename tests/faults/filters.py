"""Random Substrait filters, valid and hostile, written independently of the code that reads them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pyarrow as pa

FUNCTIONS = (b"equal", b"not_equal", b"lt", b"lte", b"gt", b"gte", b"is_null", b"is_not_null", b"is_nan")
LOGIC = (b"and", b"or", b"not")
ORIGIN = b"https://github.com/substrait-io/substrait/blob/main/extensions/functions_%s.yaml"
ARROW_TYPES = b"https://github.com/apache/arrow/blob/main/format/substrait/extension_types.yaml"
#: Arrow types that Substrait lacks, with pyarrow's names for them.
USER_TYPES = (b"u8", b"u64", b"fp16", b"large_string", b"large_binary", b"date_millis", b"time_nanos", b"null")
EXTREMES = (0, 1, 2, 3, 9, 16, 37, 38, 39, 76, 77, 127, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63)
PLAIN_TYPES = (1, 2, 3, 5, 7, 10, 11, 12, 13, 14, 16, 17, 29)
UNUSUAL = (19, 20, 21, 22, 28, 30, 31, 32, 34, 35, 40)  # kinds of types and literals that pyarrow does not write

FIXED_BINARY, DECIMAL, STRUCT, LIST, MAP, NULL = 23, 24, 25, 27, 28, 29


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def content(field: int, inner: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(inner)) + inner


def decimal_type(precision: int, scale: int = 0) -> bytes:
    return content(DECIMAL, number(1, scale) + number(2, precision) + number(4, 1))


def fixed_binary_type(width: int) -> bytes:
    return content(FIXED_BINARY, number(1, width) + number(3, 1))


def decimal_literal(precision: int, scale: int = 0, value: bytes = bytes(16)) -> bytes:
    return content(24, content(1, value) + number(2, precision) + number(3, scale))


def null_literal(type_: bytes) -> bytes:
    return content(29, type_)


def column(index: int = 0) -> bytes:
    return content(2, content(1, content(2, number(1, index))) + content(4, b""))


def call(anchor: int, *arguments: bytes, result: bytes = content(1, number(2, 1))) -> bytes:
    each = b"".join(content(4, content(3, argument)) for argument in arguments)
    return content(3, number(1, anchor) + content(3, result) + each)


def filter_of(expression: bytes, types: list[bytes]) -> bytes:
    """Return a message with this expression over columns of these types. Each function's anchor is its position."""
    declared = content(1, number(1, 1) + content(2, ORIGIN % b"comparison"))
    declared += content(1, number(1, 2) + content(2, ORIGIN % b"boolean"))
    declared += content(1, number(1, 3) + content(2, ARROW_TYPES))
    for anchor, name in enumerate(FUNCTIONS + LOGIC):
        origin = 2 if name in LOGIC else 1
        declared += content(2, content(3, number(1, origin) + number(2, anchor) + content(3, name)))
    for anchor, name in enumerate(USER_TYPES):
        declared += content(2, content(1, number(1, 3) + number(2, anchor) + content(3, name)))
    names = b"".join(content(1, f"c{at}".encode()) for at in range(len(types)))
    schema = content(4, names + content(2, b"".join(content(1, type_) for type_ in types) + number(3, 2)))
    return declared + content(3, content(1, expression) + content(3, b"x")) + schema


def hostile_filters() -> dict[str, bytes]:
    """Return types and literals with parameters that libarrow does not check, at each place of a message."""
    integer = content(7, number(2, 1))
    types = {f"decimal of precision {one}": decimal_type(one) for one in (0, 39, 77, -1, 1 << 31)}
    types |= {f"decimal of scale {one}": decimal_type(5, one) for one in (39, -1, (1 << 31) - 1, -(1 << 31))}
    types |= {f"fixed-size binary of {one}": fixed_binary_type(one) for one in (-1, -5, (1 << 31) - 1)}
    types |= {f"list of {name}": content(LIST, content(1, type_)) for name, type_ in types.items()}
    types |= {f"struct of {name}": content(STRUCT, content(1, type_)) for name, type_ in types.items()}
    types["map to a decimal"] = content(MAP, content(1, integer) + content(2, decimal_type(0)))
    types["map from a decimal"] = content(MAP, content(1, decimal_type(0)) + content(2, integer))
    types["two at once"] = integer + decimal_type(0)
    types["decimal without a precision"] = content(DECIMAL, b"")
    literals = {f"null {name}": null_literal(type_) for name, type_ in types.items()}
    literals |= {f"literal of precision {one}": decimal_literal(one) for one in (0, 39, -1)}
    literals |= {f"literal of scale {one}": decimal_literal(5, one) for one in (39, -1, (1 << 31) - 1)}
    literals["a value, then a decimal"] = number(7, 1) + decimal_literal(0)
    equal, is_null = FUNCTIONS.index(b"equal"), FUNCTIONS.index(b"is_null")
    made = {f"column: {name}": filter_of(call(is_null, column()), [type_]) for name, type_ in types.items()}
    for name, type_ in types.items():
        made[f"result: {name}"] = filter_of(call(is_null, column(), result=type_), [integer])
    for name, literal in literals.items():
        made[f"value: {name}"] = filter_of(call(equal, column(), content(1, literal)), [integer])
    logic, known = len(FUNCTIONS), call(is_null, column())
    for user_type in (b"large_string", b"large_binary"):  # libarrow reads the values of its nulls out of bounds
        null = content(1, null_literal(content(30, number(1, USER_TYPES.index(user_type)) + number(3, 1))))
        places = {
            "compared": call(equal, column(), null),
            "first": call(equal, null, column()),
            "among values": content(8, content(1, column()) + content(2, null)),
            "with a result": call(equal, known, null),
            **{f"in {LOGIC[at].decode()}": call(logic + at, known, null) for at in range(2)},
            "denied": call(logic + 2, null),
            "NaN": call(FUNCTIONS.index(b"is_nan"), null),
        }
        made |= {f"null {user_type.decode()} {place}": filter_of(one, [integer]) for place, one in places.items()}
    rooted = content(2, content(1, content(2, b"")) + content(3, content(1, decimal_literal(0))))
    made["a root beside a column"] = filter_of(call(is_null, rooted), [integer])
    cast = content(11, content(1, decimal_type(0)) + content(2, column()) + number(3, 2))
    made["cast to a decimal"] = filter_of(call(is_null, cast), [integer])
    return made


def random_filter(dice: random.Random) -> bytes:
    """Return a random filter. Most are readable, with parameters at the limits."""
    types = [random_type(dice, 0) for _ in range(dice.choice((1, 1, 2, 3)))]
    return filter_of(random_expression(dice, types, 0), types)


def random_number(dice: random.Random, usual: Callable[[], int]) -> int:
    return usual() if dice.random() < 0.95 else dice.choice((1, -1)) * dice.choice(EXTREMES) - dice.choice((0, 0, 1))


def random_type(dice: random.Random, depth: int) -> bytes:
    kind = dice.choice((*PLAIN_TYPES, *PLAIN_TYPES, 23, 23, 24, 24, 24, 25, 27, 28, 30, 30, 33, 34))
    kind = dice.choice(UNUSUAL) if dice.random() < 0.02 else kind
    nullable = dice.choice((0, 1, 1, 2))
    if depth > 3 or kind in PLAIN_TYPES:
        return content(kind if kind in PLAIN_TYPES else 7, number(2, nullable))
    if kind in (21, 22, FIXED_BINARY):
        return content(kind, number(1, random_number(dice, lambda: dice.randrange(20))) + number(3, nullable))
    if kind == DECIMAL:
        precision = random_number(dice, lambda: dice.randint(1, 38))
        scale = random_number(dice, lambda: dice.randint(0, 10))
        return content(kind, number(1, scale) + number(2, precision) + number(4, nullable))
    if kind == STRUCT:
        inner = b"".join(content(1, random_type(dice, depth + 1)) for _ in range(dice.randrange(3)))
        return content(kind, inner + number(3, nullable))
    if kind == LIST:
        return content(kind, content(1, random_type(dice, depth + 1)) + number(3, nullable))
    if kind == MAP:
        pair = content(1, random_type(dice, depth + 1)) + content(2, random_type(dice, depth + 1))
        return content(kind, pair + number(4, nullable))
    return content(kind, number(1, random_number(dice, lambda: dice.randrange(10))) + number(3, nullable))


def random_literal(dice: random.Random, types: list[bytes]) -> bytes:
    kind = dice.choice((1, 2, 3, 5, 7, 7, 10, 11, 12, 13, 14, 16, 17, 23, 24, 24, 27, 29, 29, 33))
    kind = dice.choice(UNUSUAL) if dice.random() < 0.02 else kind
    if kind == NULL:
        return null_literal(dice.choice(types) if dice.random() < 0.7 else random_type(dice, 0))
    if kind == DECIMAL:
        precision = random_number(dice, lambda: dice.randint(1, 38))
        value = dice.randbytes(16 if dice.random() < 0.9 else dice.randrange(40))
        return decimal_literal(precision, random_number(dice, lambda: dice.randint(0, 10)), value)
    if kind == 10:
        return varint(kind << 3 | 5) + dice.randbytes(4)
    if kind == 11:
        return varint(kind << 3 | 1) + dice.randbytes(8)
    if kind in (1, 2, 3, 5, 7, 14, 16, 17, 27):
        return number(kind, random_number(dice, lambda: dice.randrange(100)))
    if kind in (22, 34):
        return content(kind, number(1, dice.randrange(10)) + number(2, dice.choice(EXTREMES)))
    if kind == 33:
        kinds = dice.choice(("UInt64Value", "Int32Value", "StringValue", "BytesValue", "Any"))
        packed = content(1, f"/type.googleapis.com/google.protobuf.{kinds}".encode())
        packed += content(2, number(1, 5) if "Int" in kinds else content(1, b"abc"))
        return content(kind, number(1, dice.randrange(len(USER_TYPES) + 1)) + content(2, packed))
    return content(kind, dice.choice((b"", b"abc", "ä".encode(), dice.randbytes(4))))


def random_expression(dice: random.Random, types: list[bytes], depth: int) -> bytes:
    if depth < 4 and dice.random() < 0.4:
        inner = [random_expression(dice, types, depth + 1) for _ in range(dice.choice((1, 2, 2, 2, 3)))]
        return call(len(FUNCTIONS) + dice.randrange(len(LOGIC)), *inner)
    if dice.random() < 0.1:
        values = [content(1, random_literal(dice, types)) for _ in range(dice.randrange(4))]
        return content(8, content(1, column()) + b"".join(content(2, one) for one in values))
    if dice.random() < 0.1:
        known = call(FUNCTIONS.index(b"is_not_null"), column())
        clause = content(1, known) + content(2, random_expression(dice, types, depth + 2))
        return content(6, content(1, clause) + content(2, content(1, null_literal(content(1, number(2, 1))))))
    if dice.random() < 0.05:
        return content(dice.randrange(14), random_literal(dice, types))
    operand = column(random_number(dice, lambda: dice.randrange(len(types))))
    anchor = dice.randrange(len(FUNCTIONS))
    result = content(1, number(2, 1)) if dice.random() < 0.9 else random_type(dice, 0)
    if anchor < FUNCTIONS.index(b"is_null"):
        return call(anchor, operand, content(1, random_literal(dice, types)), result=result)
    return call(anchor, operand, result=result)


def batch_of(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch of three rows of nulls."""
    return pa.record_batch([pa.nulls(3, field.type) for field in schema], schema=schema)
