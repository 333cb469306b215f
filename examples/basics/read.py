"""Read what `publish` serves. Over shared memory, the table lies in the memory of the server: nothing is copied."""

import dissociated as dis

with dis.connect() as client:  # the catalog in DISSOCIATED_CATALOG, or your node on this host; or connect(uri)
    print(client.list())
    flights = client.dataset("flights")  # a handle, which is also a pyarrow.dataset.Dataset
    print(flights.schema.names, flights.count_rows())
    table = flights.to_table()
    print(table["dest"].to_pylist())
    for batch in client.read("flights", transport="tcp"):  # over another transport, batch by batch
        print(batch.num_rows, "rows over tcp")
