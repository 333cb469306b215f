"""Datasets for a PyTorch DataLoader: objects that are pickled to workers, which ask for items by number."""

from __future__ import annotations

import pyarrow.compute as pc

import dissociated as dis

SIZE = 256


class Rows:
    """Batches of a dataset's rows. Each worker process opens its own connection."""

    def __init__(self, client: dis.Client, name: str) -> None:
        self.client = client
        self.name = name
        self.count = (client.describe(name).rows or 0) // SIZE

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        rows = range(number * SIZE, (number + 1) * SIZE)
        return int(pc.sum(self.client.read(self.name, rows=rows, transport="shm").read_all()["n"]).as_py())


class KnownRows(Rows):
    """Batches of rows that need no catalog in the workers, because the description is fetched before they start."""

    def __init__(self, client: dis.Client, name: str) -> None:
        super().__init__(client, name)
        self.info = client.describe(name)

    def __getitem__(self, number: int) -> int:
        (endpoint,) = self.info.endpoints
        table = self.client.read_endpoint(self.info, endpoint).read_all()
        return int(pc.sum(table.slice(number * SIZE, SIZE)["n"]).as_py())


_rows: Rows


def begin(rows: Rows) -> None:
    global _rows
    _rows = rows


def item(number: int) -> int:
    return _rows[number]
