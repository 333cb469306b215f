"""A catalog that does not answer: how long Spark's tasks ask it again."""

from __future__ import annotations

import pytest

import dissociated as dis
from dissociated.errors import CatalogUnreachable
from dissociated.spark.catalog_config import CatalogConfig


def test_attempts_of_a_task_wait_once_for_a_catalog_that_is_gone() -> None:
    with dis.Server(["shm:"]) as server:
        catalog = CatalogConfig(server.catalog_uri, wait=1.5)
    calls = 0

    def ask() -> None:
        nonlocal calls
        calls += 1
        with catalog.connect() as client:
            client.nodes()

    with pytest.raises(CatalogUnreachable):
        catalog.retry(ask)
    assert calls > 1
    for _attempt in range(3):
        calls = 0
        with pytest.raises(CatalogUnreachable):
            catalog.retry(ask)
        assert calls == 1
    assert catalog.retry(lambda: "it answers") == "it answers"
    calls = 0
    with pytest.raises(CatalogUnreachable):
        catalog.retry(ask)
    assert calls > 1
