"""Put data into your node on this host, which keeps it when this program has ended. The node is started if needed."""

import pyarrow as pa

import dissociated as dis

with dis.connect() as client:
    client.put("planes", pa.table({"tailnum": ["N14228", "N24211"], "seats": [149, 149]}), tags={"of": "basics"})
    client.put("planes", pa.table({"tailnum": ["N619AA"], "seats": [178]}), mode="append")
    planes = client.dataset("planes")
    print(planes.to_table()["seats"].to_pylist(), planes.tags)
    for version in client.versions("planes"):
        print(f"version {version['version']}: {version['rows']} rows")

print("from a terminal: dissociated head planes; dissociated status; dissociated drop planes; dissociated stop")
