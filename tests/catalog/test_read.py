"""Reading by name, while servers and datasets come and go."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import TransportError
from dissociated.uri import Uri
from helpers import PATIENCE

TABLE = pa.table({"n": range(1000)})


def test_the_next_nearest_transport_is_tried() -> None:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)
        path = Uri.parse(server.locations("data")[0]).path
        os.unlink(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(path)  # there, and nobody listens
        assert client.read("data").read_all() == TABLE
        with pytest.raises(TransportError, match="Connection refused"):
            client.read("data", "shm")
        os.unlink(path)


def test_a_dataset_that_is_replaced_all_the_time_can_be_read() -> None:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", TABLE)
        stop = threading.Event()

        def replace() -> None:
            while not stop.wait(0.005):  # about as often as it can be looked up
                server.publish("data", TABLE)

        replacing = threading.Thread(target=replace)
        replacing.start()
        try:
            for _ in range(50):
                assert client.read("data").read_all() == TABLE
        finally:
            stop.set()
            replacing.join()


def test_a_server_on_all_interfaces_names_a_host() -> None:
    with dis.Server(["tcp://0.0.0.0:0"], advertise="localhost") as server:
        server.publish("data", TABLE)
        (location,) = server.locations("data")
        assert location.startswith("tcp://localhost:")
        with dis.connect(server.catalog_uri) as client:
            assert client.read("data", "tcp").read_all() == TABLE
    with dis.Server(["tcp://0.0.0.0:0"], catalog=None) as server:
        server.publish("data", TABLE)
        assert server.locations("data")[0].startswith(f"tcp://{socket.gethostname().lower()}:")


def test_a_forked_process_takes_nothing_down() -> None:
    script = """
        import os, sys
        import pyarrow as pa
        import dissociated as dis
        table = pa.table({"n": range(1000)})
        with dis.Server(["shm:", "tcp://127.0.0.1:0"], catalog=None) as server:
            server.publish("data", table)
            uris, ticket = server.locations("data"), server.ticket("data")
            readers = [dis.open_stream(uri, ticket) for uri in uris]
            child = os.fork()
            if not child:
                for listener in server._listeners:
                    listener.close()
                del readers
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert all(reader.read_all() == table for reader in readers)
            assert all(dis.open_stream(uri, ticket).read_all() == table for uri in uris)
        """
    run = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    assert subprocess.run(run, timeout=PATIENCE).returncode == 0
