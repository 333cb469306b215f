"""Every Arrow type survives every way from a source to a reader."""

from __future__ import annotations

import pyarrow as pa

from support.arrow_cases import ARRAYS, batches
from support.helpers import case

from .conftest import Route


def check(route: Route, sent: list[pa.RecordBatch]) -> None:
    """Read batches from a table, and over a quick route also from a live source one by one."""
    if route.is_quick:
        schema, arrived = route.read(lambda: pa.RecordBatchReader.from_batches(sent[0].schema, sent))
        assert schema.equals(sent[0].schema, check_metadata=True)
        assert arrived == sent
    schema, arrived = route.read(pa.Table.from_batches(sent))
    assert schema.equals(sent[0].schema, check_metadata=True)
    assert pa.Table.from_batches(arrived) == pa.Table.from_batches(sent)


def test_each_type(either: Route) -> None:
    for type_, arrays in ARRAYS.items():
        with case(type_):
            check(either, batches(arrays))


def test_all_types_side_by_side(direct: Route) -> None:
    whole = [batches(arrays) for arrays in ARRAYS.values()]
    columns = [
        [column for batch in side_by_side for column in batch.columns] for side_by_side in zip(*whole, strict=True)
    ]
    names = [f"{type_} {name}" for type_, (batch, *_) in zip(ARRAYS, whole, strict=True) for name in batch.schema.names]
    check(direct, [pa.record_batch(some, names) for some in columns])


def test_an_extension_type_that_the_reader_does_not_know_arrives_as_its_storage(either: Route) -> None:
    sent = pa.table({"t": ARRAYS["extension"][0]})
    name = sent.schema.field("t").type.extension_name
    either.publish(sent)
    pa.unregister_extension_type(name)
    try:
        arrived = either.open().read_all()
    finally:
        pa.register_extension_type(sent.schema.field("t").type)
    assert arrived["t"].combine_chunks() == ARRAYS["extension"][0].storage
    assert arrived.schema.field("t").metadata == {
        b"ARROW:extension:name": name.encode(),
        b"ARROW:extension:metadata": b"scale=C",
    }
