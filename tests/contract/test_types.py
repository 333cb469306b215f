"""Every Arrow type survives every way from a source to a reader."""

from __future__ import annotations

import pyarrow as pa
import pytest
from arrow_cases import ARRAYS, batches

from .conftest import Route


@pytest.mark.parametrize("type_", ARRAYS)
def test_batches_of_a_live_source_arrive_as_they_are(route: Route, type_: str) -> None:
    sent = batches(ARRAYS[type_])
    schema, arrived = route.read(lambda: pa.RecordBatchReader.from_batches(sent[0].schema, sent))
    assert schema.equals(sent[0].schema, check_metadata=True)
    assert arrived == sent


@pytest.mark.parametrize("type_", ARRAYS)
def test_tables_arrive_as_they_are(route: Route, type_: str) -> None:
    sent = pa.Table.from_batches(batches(ARRAYS[type_]))
    schema, arrived = route.read(sent)
    assert schema.equals(sent.schema, check_metadata=True)
    assert pa.Table.from_batches(arrived) == sent


def test_an_extension_type_that_the_reader_does_not_know_arrives_as_its_storage(route: Route) -> None:
    sent = pa.table({"t": ARRAYS["extension"][0]})
    name = sent.schema.field("t").type.extension_name
    route.publish(sent)
    pa.unregister_extension_type(name)
    try:
        arrived = route.open().read_all()
    finally:
        pa.register_extension_type(sent.schema.field("t").type)
    assert arrived["t"].combine_chunks() == ARRAYS["extension"][0].storage
    assert arrived.schema.field("t").metadata == {
        b"ARROW:extension:name": name.encode(),
        b"ARROW:extension:metadata": b"scale=C",
    }
