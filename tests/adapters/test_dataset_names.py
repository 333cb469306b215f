"""Names of datasets for assets of Dagster. These tests do not need Dagster."""

from __future__ import annotations

from dissociated.adapters.dagster import dataset_name


def test_names_are_made_of_the_parts_of_a_key() -> None:
    assert dataset_name(["raw", "sales"]) == "raw/sales"
    assert dataset_name(["raw", "sales"], "2026-11-24|eu") == "raw/sales/@2026-11-24|eu"
    assert dataset_name(["a/b", "50%"], "x@y/z") == "a%2Fb/50%25/@x%40y%2Fz"


def test_no_two_assets_and_partitions_share_a_dataset() -> None:
    assets = [
        (["sales"], "eu"),
        (["sales", "eu"], None),
        (["sales", "@eu"], None),
        (["sales/@eu"], None),
        (["sales/eu"], None),
        (["sales%2Feu"], None),
        (["sales", "%40eu"], None),
        (["sales"], "@eu"),
        (["sales", "x"], "y"),
        (["sales"], "x/y"),
        (["sales"], "x/@y"),
    ]
    assert len({dataset_name(asset, partition) for asset, partition in assets}) == len(assets)
