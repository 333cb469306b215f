"""The parameters of reads and of clients, which each public function declares for itself: they agree everywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import Parameter, signature
from typing import Any

import dissociated as dis
from dissociated.client.request import ReadRequest

READS: list[Callable[..., Any]] = [
    dis.Client.read,
    dis.Client.read_on_device,
    dis.Client.read_endpoint,
    dis.Client.read_tensors,
    dis.open_stream,
    dis.open_stream_on_device,
    dis.open_tensors,
]


def test_a_parameter_of_reads_has_one_type_and_one_default() -> None:
    types: dict[str, set[str]] = {}
    defaults: dict[str, set[object]] = {}
    for read in READS:
        for parameter in signature(read).parameters.values():
            if parameter.kind is Parameter.KEYWORD_ONLY:
                types.setdefault(parameter.name, set()).add(parameter.annotation)
                defaults.setdefault(parameter.name, set()).add(parameter.default)
    assert {name: found for name, found in types.items() if len(found) > 1} == {}
    of_request = {field.name: {field.default} for field in fields(ReadRequest)}
    of_request |= {"options": {None}, "version": {None}}  # the first becomes ReadOptions(), the second is looked up
    assert defaults == {name: of_request[name] for name in defaults}


def test_a_read_onto_a_device_takes_what_a_read_takes() -> None:
    for read, onto_device in (
        (dis.Client.read, dis.Client.read_on_device),
        (dis.open_stream, dis.open_stream_on_device),
    ):
        further = signature(onto_device).parameters.keys() - signature(read).parameters.keys()
        assert further == {"device", "decompress"}
        assert signature(read).parameters.keys() < signature(onto_device).parameters.keys()


def test_a_client_takes_what_connect_takes() -> None:
    connect, client = (
        {name: (parameter.annotation, parameter.default) for name, parameter in signature(call).parameters.items()}
        for call in (dis.connect, dis.Client)
    )
    assert connect.pop("catalog_uri") == ("str | None", None)
    assert client.pop("uri") == ("str", Parameter.empty)
    assert connect == client
