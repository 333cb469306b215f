"""The messages of Substrait that a filter may consist of, with the range of each parameter that libarrow trusts.

libarrow ends the process for a decimal of precision 0 or above 38, and reads beyond its memory for a null of a
fixed-size binary type of negative length. It takes types in the schema, as the result of a function, and in a null.
The numbers are those of substrait's `extended_expression.proto`, `algebra.proto` and `type.proto`.
"""

from __future__ import annotations

from dissociated.codec.protobuf import BYTES, FIXED32, FIXED64, NUMBER, ONE_OF, TEXT, Grammar

_DECIMAL_DIGITS = 38
_MAX_WIDTH = 1 << 16  # bytes of a value of a fixed-size binary type: libarrow allocates them for each null
_PRECISION = range(1, _DECIMAL_DIGITS + 1)
_SCALE = range(_DECIMAL_DIGITS + 1)
_WIDTH = range(_MAX_WIDTH + 1)
_SUBSECOND = range(10)  # digits below a second
_NULLABILITY = range(3)
_VARIATION = range(1)  # variations of types have no meaning to libarrow
_REFERENCE = range(1 << 31)
_PLAIN: dict[int, range] = {1: _VARIATION, 2: _NULLABILITY}

GRAMMAR: Grammar = {
    "ExtendedExpression": {
        1: "*ExtensionUri",
        2: "*ExtensionDeclaration",
        3: "*ExpressionReference",
        4: "NamedStruct",
        7: "Version",
    },
    "ExtensionUri": {1: _REFERENCE, 2: TEXT},
    "ExtensionDeclaration": {ONE_OF: {1: "Extension", 3: "Extension"}},
    "Extension": {1: _REFERENCE, 2: _REFERENCE, 3: TEXT},
    "Version": {1: NUMBER, 2: NUMBER, 3: NUMBER, 4: TEXT, 5: TEXT},
    "NamedStruct": {1: "*text", 2: "Struct"},
    "ExpressionReference": {1: "Expression", 3: "*text"},
    "Expression": {
        ONE_OF: {1: "Literal", 2: "FieldReference", 3: "ScalarFunction", 6: "IfThen", 8: "SingularOrList"},
    },
    "ScalarFunction": {1: _REFERENCE, 3: "Type", 4: "*FunctionArgument"},
    "FunctionArgument": {3: "Expression"},
    "IfThen": {1: "*IfClause", 2: "Expression"},
    "IfClause": {1: "Expression", 2: "Expression"},
    "SingularOrList": {1: "Expression", 2: "*Expression"},
    "FieldReference": {1: "ReferenceSegment", 4: "RootReference"},
    "RootReference": {},
    "ReferenceSegment": {ONE_OF: {2: "StructField"}},
    "StructField": {1: _REFERENCE, 2: "ReferenceSegment"},
    "Literal": {
        ONE_OF: {
            **dict.fromkeys((1, 2, 3, 5, 7), NUMBER),  # a boolean, and integers of 8 to 64 bits
            10: FIXED32,
            11: FIXED64,
            12: TEXT,
            **dict.fromkeys((13, 23), BYTES),  # binary, and fixed-size binary
            **dict.fromkeys((14, 16, 17, 27), NUMBER),  # a timestamp, date, time, and timestamp with a zone
            24: "DecimalValue",
            29: "Type",  # null
            33: "UserDefinedValue",
        },
        50: range(2),
        51: _VARIATION,
    },
    "DecimalValue": {1: BYTES, 2: _PRECISION, 3: _SCALE},
    "UserDefinedValue": {1: _REFERENCE, 2: "Any"},
    "Any": {1: TEXT, 2: BYTES},
    "Type": {
        ONE_OF: {
            **dict.fromkeys((1, 2, 3, 5, 7, 10, 11, 12, 13, 14, 16, 17, 29), "Plain"),
            23: "FixedBinary",
            24: "Decimal",
            25: "Struct",
            27: "List",
            28: "Map",
            30: "UserDefined",
            33: "PrecisionTimestamp",
            34: "PrecisionTimestamp",
        },
    },
    "Plain": _PLAIN,
    "FixedBinary": {1: _WIDTH, 2: _VARIATION, 3: _NULLABILITY},
    "Decimal": {1: _SCALE, 2: _PRECISION, 3: _VARIATION, 4: _NULLABILITY},
    "Struct": {1: "*Type", 2: _VARIATION, 3: _NULLABILITY},
    "List": {1: "Type", 2: _VARIATION, 3: _NULLABILITY},
    "Map": {1: "Type", 2: "Type", 3: _VARIATION, 4: _NULLABILITY},
    "UserDefined": {1: _REFERENCE, 2: _VARIATION, 3: _NULLABILITY},
    "PrecisionTimestamp": {1: _SUBSECOND, 2: _VARIATION, 3: _NULLABILITY},
}
