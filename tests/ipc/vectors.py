"""Arrow IPC messages byte by byte, and what is in them.

Each was written by libarrow 26 (`pyarrow.ipc.new_stream`); what its bytes mean follows Message.fbs, Schema.fbs and
"Encapsulated message format". Nothing here calls the code under test.
"""

from __future__ import annotations


class Vector:
    """One message: its prefix, its flatbuffer with the padding, its body (None for a schema)."""

    def __init__(self, prefix: str, header: str, body: str | None) -> None:
        self.prefix = bytes.fromhex(prefix)
        self.header = bytes.fromhex(header)
        self.body = None if body is None else bytes.fromhex(body)

    @property
    def whole(self) -> bytes:
        """The encapsulated message."""
        return self.prefix + self.header + (self.body or b"")

    def legacy(self) -> bytes:
        """As libraries before 0.15 wrote it: without the marker, and padded so that the body is aligned without it."""
        length = int.from_bytes(self.prefix[4:], "little") + 4
        return length.to_bytes(4, "little") + self.header + bytes(4) + (self.body or b"")

    def version_4(self, at: int) -> bytes:
        """With `version 3, V4` at this position of the flatbuffer. Nothing else differs in what libarrow writes."""
        return self.prefix + self.header[:at] + b"\x03\x00" + self.header[at + 2 :] + (self.body or b"")


END = bytes.fromhex("ffffffff 00000000")  # continuation marker, no metadata
LEGACY_END = bytes.fromhex("00000000")  # no metadata

#: One field, `n: int32 not null`.
SCHEMA = Vector(
    "ffffffff 78000000",  # continuation marker; length of the metadata: 120 bytes
    (
        "10000000"  # 0: root table at 16
        "0000"  # padding
        "0a00 0c00"  # 6: vtable of 10 bytes, for tables of 12
        "0600 0500 0800"  # version 6, header_type 5, header 8
        "0a000000"  # 16: Message: vtable at 16 - 10
        "00"  # padding
        "01"  # header_type 1, Schema
        "0400"  # version 4, V5
        "0c000000"  # header 12 ahead, at 36
        "0800 0800"  # 28: vtable of 8 bytes, for tables of 8
        "0000 0400"  # fields 4
        "08000000"  # 36: Schema: vtable at 36 - 8
        "04000000"  # fields 4 ahead, at 44
        "01000000"  # 44: 1 Field
        "14000000"  # Field 20 ahead, at 68
        "1000 1400"  # 52: vtable of 16 bytes, for tables of 20
        "0800 0000 0700 0c00 0000 1000"  # name 8, type_type 7, type 12, children 16
        "10000000"  # 68: Field: vtable at 68 - 16
        "000000"  # padding
        "02"  # type_type 2, Int
        "10000000"  # name 16 ahead, at 92
        "1c000000"  # type 28 ahead, at 108
        "04000000"  # children 4 ahead, at 88
        "00000000"  # 88: 0 Fields
        "010000006e00"  # 92: 1 byte "n", 0
        "0000"  # padding
        "0800 0c00"  # 100: vtable of 8 bytes, for tables of 12
        "0800 0700"  # bitWidth 8, is_signed 7
        "08000000"  # 108: Int: vtable at 108 - 8
        "000000"  # padding
        "01"  # is_signed True
        "20000000"  # bitWidth 32
    ),
    None,
)

#: Three rows: 1, 2, 3.
BATCH = Vector(
    "ffffffff 88000000",  # continuation marker; length of the metadata: 136 bytes
    (
        "14000000"  # 0: root table at 20
        "00000000"  # padding
        "0c00 1600"  # 8: vtable of 12 bytes, for tables of 22
        "0600 0500 0800 0c00"  # version 6, header_type 5, header 8, bodyLength 12
        "0c000000"  # 20: Message: vtable at 20 - 12
        "00"  # padding
        "03"  # header_type 3, RecordBatch
        "0400"  # version 4, V5
        "18000000"  # header 24 ahead, at 52
        "1000000000000000"  # bodyLength 16
        "0000"  # padding
        "0a00 1800"  # 42: vtable of 10 bytes, for tables of 24
        "0c00 0400 0800"  # length 12, nodes 4, buffers 8
        "0a000000"  # 52: RecordBatch: vtable at 52 - 10
        "3c000000"  # nodes 60 ahead, at 116
        "10000000"  # buffers 16 ahead, at 76
        "0300000000000000"  # length 3
        "00000000"  # padding
        "02000000"  # 76: 2 Buffers
        "0000000000000000 0000000000000000"  # offset 0, length 0
        "0000000000000000 0c00000000000000"  # offset 0, length 12
        "00000000"  # padding
        "01000000"  # 116: 1 FieldNode
        "0300000000000000 0000000000000000"  # length 3, nulls 0
    ),
    (
        "01000000 02000000 03000000"  # n
        "00000000"  # padding to a multiple of 8
    ),
)

#: The same three rows, with the metadata k: v.
ANNOTATED = Vector(
    "ffffffff b8000000",  # continuation marker; length of the metadata: 184 bytes
    (
        "18000000"  # 0: root table at 24
        "000000000000"  # padding
        "0e00 1800"  # 10: vtable of 14 bytes, for tables of 24
        "0600 0500 0800 1000 0c00"  # version 6, header_type 5, header 8, bodyLength 16, custom_metadata 12
        "0e000000"  # 24: Message: vtable at 24 - 14
        "00"  # padding
        "03"  # header_type 3, RecordBatch
        "0400"  # version 4, V5
        "44000000"  # header 68 ahead, at 100
        "0c000000"  # custom_metadata 12 ahead, at 48
        "1000000000000000"  # bodyLength 16
        "01000000"  # 48: 1 KeyValue
        "0c000000"  # KeyValue 12 ahead, at 64
        "0800 0c00"  # 56: vtable of 8 bytes, for tables of 12
        "0400 0800"  # key 4, value 8
        "08000000"  # 64: KeyValue: vtable at 64 - 8
        "10000000"  # key 16 ahead, at 84
        "04000000"  # value 4 ahead, at 76
        "010000007600"  # 76: 1 byte "v", 0
        "0000"  # padding
        "010000006b00"  # 84: 1 byte "k", 0
        "0a00 1800"  # 90: vtable of 10 bytes, for tables of 24
        "0c00 0400 0800"  # length 12, nodes 4, buffers 8
        "0a000000"  # 100: RecordBatch: vtable at 100 - 10
        "3c000000"  # nodes 60 ahead, at 164
        "10000000"  # buffers 16 ahead, at 124
        "0300000000000000"  # length 3
        "00000000"  # padding
        "02000000"  # 124: 2 Buffers
        "0000000000000000 0000000000000000"  # offset 0, length 0
        "0000000000000000 0c00000000000000"  # offset 0, length 12
        "00000000"  # padding
        "01000000"  # 164: 1 FieldNode
        "0300000000000000 0000000000000000"  # length 3, nulls 0
    ),
    (
        "01000000 02000000 03000000"  # n
        "00000000"  # padding to a multiple of 8
    ),
)

#: No rows. The length of the batch and of the body are 0, and flatbuffers leave that out.
EMPTY = Vector(
    "ffffffff 70000000",  # continuation marker; length of the metadata: 112 bytes
    (
        "10000000"  # 0: root table at 16
        "0000"  # padding
        "0a00 0e00"  # 6: vtable of 10 bytes, for tables of 14
        "0600 0500 0800"  # version 6, header_type 5, header 8
        "0a000000"  # 16: Message: vtable at 16 - 10
        "00"  # padding
        "03"  # header_type 3, RecordBatch
        "0400"  # version 4, V5
        "10000000"  # header 16 ahead, at 40
        "0000"  # padding
        "0a00 0c00"  # 30: vtable of 10 bytes, for tables of 12
        "0000 0400 0800"  # nodes 4, buffers 8
        "0a000000"  # 40: RecordBatch: vtable at 40 - 10
        "30000000"  # nodes 48 ahead, at 92
        "04000000"  # buffers 4 ahead, at 52
        "02000000"  # 52: 2 Buffers
        "0000000000000000 0000000000000000"  # offset 0, length 0
        "0000000000000000 0000000000000000"  # offset 0, length 0
        "00000000"  # padding
        "01000000"  # 92: 1 FieldNode
        "0000000000000000 0000000000000000"  # length 0, nulls 0
    ),
    "",
)

#: Sixty-four rows of 7, compressed with LZ4. The codec is 0 and the method is 0: flatbuffers leave that out.
LZ4 = Vector(
    "ffffffff 98000000",  # continuation marker; length of the metadata: 152 bytes
    (
        "14000000"  # 0: root table at 20
        "00000000"  # padding
        "0c00 1800"  # 8: vtable of 12 bytes, for tables of 24
        "0600 0500 0800 0c00"  # version 6, header_type 5, header 8, bodyLength 12
        "0c000000"  # 20: Message: vtable at 20 - 12
        "00"  # padding
        "03"  # header_type 3, RecordBatch
        "0400"  # version 4, V5
        "1c000000"  # header 28 ahead, at 56
        "2800000000000000"  # bodyLength 40
        "00000000"  # padding
        "0c00 1c00"  # 44: vtable of 12 bytes, for tables of 28
        "1000 0400 0800 0c00"  # length 16, nodes 4, buffers 8, compression 12
        "0c000000"  # 56: RecordBatch: vtable at 56 - 12
        "48000000"  # nodes 72 ahead, at 132
        "1c000000"  # buffers 28 ahead, at 92
        "14000000"  # compression 20 ahead, at 88
        "4000000000000000"  # length 64
        "00000000"  # padding
        "0400 0400"  # 84: vtable of 4 bytes, for tables of 4
        "04000000"  # 88: BodyCompression: vtable at 88 - 4
        "02000000"  # 92: 2 Buffers
        "0000000000000000 0000000000000000"  # offset 0, length 0
        "0000000000000000 2500000000000000"  # offset 0, length 37
        "00000000"  # padding
        "01000000"  # 132: 1 FieldNode
        "4000000000000000 0000000000000000"  # length 64, nulls 0
    ),
    (
        "0001000000000000"  # 256 bytes when it is decompressed
        "04224d18 60 40 82"  # magic of LZ4 frames; version 1, independent blocks; of at most 64 KiB; checksum
        "0e000000 4f 07000000 0400 e4 50 0007000000"  # a block of 14 bytes: 4, 247 from 4 before, 5
        "00000000"  # end of the frame
        "000000"  # padding
    ),
)

#: The same, compressed with ZSTD.
ZSTD = Vector(
    "ffffffff a0000000",  # continuation marker; length of the metadata: 160 bytes
    (
        "14000000"  # 0: root table at 20
        "00000000"  # padding
        "0c00 1800"  # 8: vtable of 12 bytes, for tables of 24
        "0600 0500 0800 0c00"  # version 6, header_type 5, header 8, bodyLength 12
        "0c000000"  # 20: Message: vtable at 20 - 12
        "00"  # padding
        "03"  # header_type 3, RecordBatch
        "0400"  # version 4, V5
        "1c000000"  # header 28 ahead, at 56
        "2000000000000000"  # bodyLength 32
        "00000000"  # padding
        "0c00 1e00"  # 44: vtable of 12 bytes, for tables of 30
        "1000 0400 0800 0c00"  # length 16, nodes 4, buffers 8, compression 12
        "0c000000"  # 56: RecordBatch: vtable at 56 - 12
        "50000000"  # nodes 80 ahead, at 140
        "24000000"  # buffers 36 ahead, at 100
        "18000000"  # compression 24 ahead, at 92
        "4000000000000000"  # length 64
        "000000000000"  # padding
        "0600 0800"  # 86: vtable of 6 bytes, for tables of 8
        "0700"  # codec 7
        "06000000"  # 92: BodyCompression: vtable at 92 - 6
        "000000"  # padding
        "01"  # codec 1, ZSTD
        "02000000"  # 100: 2 Buffers
        "0000000000000000 0000000000000000"  # offset 0, length 0
        "0000000000000000 1d00000000000000"  # offset 0, length 29
        "00000000"  # padding
        "01000000"  # 140: 1 FieldNode
        "4000000000000000 0000000000000000"  # length 64, nulls 0
    ),
    (
        "0001000000000000"  # 256 bytes when it is decompressed
        "28b52ffd 60 0000"  # magic of ZSTD frames; one segment; of 256 + 0 bytes
        "5d0000 20 07000000 01 00 f929 47 04"  # a compressed block, the last, of 11 bytes
        "000000"  # padding
    ),
)

#: One field, `d: dictionary<int8, utf8>`, whose dictionary has the number 0.
WORDS_SCHEMA = Vector(
    "ffffffff 90000000",  # continuation marker; length of the metadata: 144 bytes
    (
        "10000000"  # 0: root table at 16
        "0000"  # padding
        "0a00 0c00"  # 6: vtable of 10 bytes, for tables of 12
        "0600 0500 0800"  # version 6, header_type 5, header 8
        "0a000000"  # 16: Message: vtable at 16 - 10
        "00"  # padding
        "01"  # header_type 1, Schema
        "0400"  # version 4, V5
        "04000000"  # header 4 ahead, at 28
        "bcffffff"  # 28: Schema: vtable at 28 - -68
        "04000000"  # fields 4 ahead, at 36
        "01000000"  # 36: 1 Field
        "14000000"  # Field 20 ahead, at 60
        "1000 1800"  # 44: vtable of 16 bytes, for tables of 24
        "0800 0600 0700 0c00 1000 1400"  # name 8, nullable 6, type_type 7, type 12, dictionary 16, children 20
        "10000000"  # 60: Field: vtable at 60 - 16
        "0000"  # padding
        "01"  # nullable True
        "05"  # type_type 5, Utf8
        "14000000"  # name 20 ahead, at 88
        "40000000"  # type 64 ahead, at 136
        "1c000000"  # dictionary 28 ahead, at 104
        "04000000"  # children 4 ahead, at 84
        "00000000"  # 84: 0 Fields
        "010000006400"  # 88: 1 byte "d", 0
        "0000"  # padding
        "0800 0800"  # 96: vtable of 8 bytes, for tables of 8
        "0000 0400"  # indexType 4
        "08000000"  # 104: DictionaryEncoding: vtable at 104 - 8
        "0c000000"  # indexType 12 ahead, at 120
        "0800 0c00"  # 112: vtable of 8 bytes, for tables of 12
        "0800 0700"  # bitWidth 8, is_signed 7
        "08000000"  # 120: Int: vtable at 120 - 8
        "000000"  # padding
        "01"  # is_signed True
        "08000000"  # bitWidth 8
        "0400 0400"  # 132: vtable of 4 bytes, for tables of 4
        "04000000"  # 136: Utf8: vtable at 136 - 4
        "00000000"  # padding
    ),
    None,
)

#: Its dictionary: "a", "bc".
WORDS = Vector(
    "ffffffff a8000000",  # continuation marker; length of the metadata: 168 bytes
    (
        "14000000"  # 0: root table at 20
        "00000000"  # padding
        "0c00 1400"  # 8: vtable of 12 bytes, for tables of 20
        "0600 0500 0800 0c00"  # version 6, header_type 5, header 8, bodyLength 12
        "0c000000"  # 20: Message: vtable at 20 - 12
        "00"  # padding
        "02"  # header_type 2, DictionaryBatch
        "0400"  # version 4, V5
        "14000000"  # header 20 ahead, at 48
        "1800000000000000"  # bodyLength 24
        "0800 0a00"  # 40: vtable of 8 bytes, for tables of 10
        "0000 0400"  # data 4
        "08000000"  # 48: DictionaryBatch: vtable at 48 - 8
        "10000000"  # data 16 ahead, at 68
        "0000"  # padding
        "0a00 1800"  # 58: vtable of 10 bytes, for tables of 24
        "0c00 0400 0800"  # length 12, nodes 4, buffers 8
        "0a000000"  # 68: RecordBatch: vtable at 68 - 10
        "4c000000"  # nodes 76 ahead, at 148
        "10000000"  # buffers 16 ahead, at 92
        "0200000000000000"  # length 2
        "00000000"  # padding
        "03000000"  # 92: 3 Buffers
        "0000000000000000 0000000000000000"  # offset 0, length 0
        "0000000000000000 0c00000000000000"  # offset 0, length 12
        "1000000000000000 0300000000000000"  # offset 16, length 3
        "00000000"  # padding
        "01000000"  # 148: 1 FieldNode
        "0200000000000000 0000000000000000"  # length 2, nulls 0
    ),
    (
        "00000000 01000000 03000000"  # offsets
        "00000000"  # padding
        "616263 0000000000"  # "abc", padding
    ),
)

#: Three rows: 0, 1, null.
INDICES = Vector(
    "ffffffff 88000000",  # continuation marker; length of the metadata: 136 bytes
    (
        "14000000"  # 0: root table at 20
        "00000000"  # padding
        "0c00 1600"  # 8: vtable of 12 bytes, for tables of 22
        "0600 0500 0800 0c00"  # version 6, header_type 5, header 8, bodyLength 12
        "0c000000"  # 20: Message: vtable at 20 - 12
        "00"  # padding
        "03"  # header_type 3, RecordBatch
        "0400"  # version 4, V5
        "18000000"  # header 24 ahead, at 52
        "1000000000000000"  # bodyLength 16
        "0000"  # padding
        "0a00 1800"  # 42: vtable of 10 bytes, for tables of 24
        "0c00 0400 0800"  # length 12, nodes 4, buffers 8
        "0a000000"  # 52: RecordBatch: vtable at 52 - 10
        "3c000000"  # nodes 60 ahead, at 116
        "10000000"  # buffers 16 ahead, at 76
        "0300000000000000"  # length 3
        "00000000"  # padding
        "02000000"  # 76: 2 Buffers
        "0000000000000000 0100000000000000"  # offset 0, length 1
        "0800000000000000 0300000000000000"  # offset 8, length 3
        "00000000"  # padding
        "01000000"  # 116: 1 FieldNode
        "0300000000000000 0100000000000000"  # length 3, nulls 1
    ),
    (
        "03 00000000000000"  # validity: the first two; padding
        "000100 0000000000"  # indices, padding
    ),
)

#: What its dictionary grows by: "d".
DELTA = Vector(
    "ffffffff b0000000",  # continuation marker; length of the metadata: 176 bytes
    (
        "14000000"  # 0: root table at 20
        "00000000"  # padding
        "0c00 1600"  # 8: vtable of 12 bytes, for tables of 22
        "0600 0500 0800 0c00"  # version 6, header_type 5, header 8, bodyLength 12
        "0c000000"  # 20: Message: vtable at 20 - 12
        "00"  # padding
        "02"  # header_type 2, DictionaryBatch
        "0400"  # version 4, V5
        "18000000"  # header 24 ahead, at 52
        "1000000000000000"  # bodyLength 16
        "0000"  # padding
        "0a00 0e00"  # 42: vtable of 10 bytes, for tables of 14
        "0000 0800 0700"  # data 8, isDelta 7
        "0a000000"  # 52: DictionaryBatch: vtable at 52 - 10
        "000000"  # padding
        "01"  # isDelta True
        "10000000"  # data 16 ahead, at 76
        "0000"  # padding
        "0a00 1800"  # 66: vtable of 10 bytes, for tables of 24
        "0c00 0400 0800"  # length 12, nodes 4, buffers 8
        "0a000000"  # 76: RecordBatch: vtable at 76 - 10
        "4c000000"  # nodes 76 ahead, at 156
        "10000000"  # buffers 16 ahead, at 100
        "0100000000000000"  # length 1
        "00000000"  # padding
        "03000000"  # 100: 3 Buffers
        "0000000000000000 0000000000000000"  # offset 0, length 0
        "0000000000000000 0800000000000000"  # offset 0, length 8
        "0800000000000000 0100000000000000"  # offset 8, length 1
        "00000000"  # padding
        "01000000"  # 156: 1 FieldNode
        "0100000000000000 0000000000000000"  # length 1, nulls 0
    ),
    (
        "00000000 01000000"  # offsets
        "64 00000000000000"  # "d", padding
    ),
)

#: One row: 2.
MORE_INDICES = Vector(
    "ffffffff 88000000",  # continuation marker; length of the metadata: 136 bytes
    (
        "14000000"  # 0: root table at 20
        "00000000"  # padding
        "0c00 1600"  # 8: vtable of 12 bytes, for tables of 22
        "0600 0500 0800 0c00"  # version 6, header_type 5, header 8, bodyLength 12
        "0c000000"  # 20: Message: vtable at 20 - 12
        "00"  # padding
        "03"  # header_type 3, RecordBatch
        "0400"  # version 4, V5
        "18000000"  # header 24 ahead, at 52
        "0800000000000000"  # bodyLength 8
        "0000"  # padding
        "0a00 1800"  # 42: vtable of 10 bytes, for tables of 24
        "0c00 0400 0800"  # length 12, nodes 4, buffers 8
        "0a000000"  # 52: RecordBatch: vtable at 52 - 10
        "3c000000"  # nodes 60 ahead, at 116
        "10000000"  # buffers 16 ahead, at 76
        "0100000000000000"  # length 1
        "00000000"  # padding
        "02000000"  # 76: 2 Buffers
        "0000000000000000 0000000000000000"  # offset 0, length 0
        "0000000000000000 0100000000000000"  # offset 0, length 1
        "00000000"  # padding
        "01000000"  # 116: 1 FieldNode
        "0100000000000000 0000000000000000"  # length 1, nulls 0
    ),
    "02 00000000000000",  # index, padding
)
