"""A UCX peer for tests: it does what another program on UCX may do, and also what none should.

The module uses nothing of dissociated. It also runs as a process of its own, to be killed or stopped:

    python ucx_peer.py server MODE        run the steps that come as JSON on standard input, see `play`
    python ucx_peer.py client URI

Steps: am HEX (send an active message of id 0); tag NUMBER HEX (send a tagged message; pending: do not wait for it);
read N (receive N messages of either kind); stream (read metadata to its end); reached (tell the parent); hold (continue
until the peer is gone); sleep (forever).
"""

from __future__ import annotations

import json
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from support import ucx_binding as c

PATIENCE = 10.0

#: Features that the C++ reference requests.
FEATURES = c.FEATURE_TAG | c.FEATURE_AM | c.FEATURE_RMA | c.FEATURE_WAKEUP | c.FEATURE_STREAM

#: Tags that the scripted servers put into their URIs.
WANT, FREE = 7, 9


class Context:
    """A context like the reference's: its only settings are those of the environment."""

    def __init__(self, features: int = FEATURES) -> None:
        self.ucp = u = c.ucx()
        config = u.ffi.new("ucp_config_t **")
        u.check(u.lib.ucp_config_read(u.ffi.NULL, u.ffi.NULL, config))
        params = u.ffi.new("ucp_params_t *")
        params.field_mask, params.features = c.PARAM_FEATURES, features
        made = u.ffi.new("ucp_context_h *")
        u.check(u.lib.ucp_init_version(1, 12, params, config[0], made))
        u.lib.ucp_config_release(config[0])
        self.handle = made[0]

    def close(self) -> None:
        self.ucp.lib.ucp_cleanup(self.handle)


class Worker:
    """A worker with at most one endpoint, and everything that it has received."""

    def __init__(self, context: Context) -> None:
        self.ucp = u = context.ucp
        self.lib, self.ffi = u.lib, u.ffi
        params = self.ffi.new("ucp_worker_params_t *")
        params.field_mask = c.WORKER_PARAM_THREAD_MODE | c.WORKER_PARAM_FLAGS
        params.thread_mode, params.flags = c.THREAD_MODE_SERIALIZED, c.WORKER_IGNORE_REQUEST_LEAK
        made = self.ffi.new("ucp_worker_h *")
        u.check(self.lib.ucp_worker_create(context.handle, params, made))
        self.handle = made[0]
        descriptor = self.ffi.new("int *")
        u.check(self.lib.ucp_worker_get_efd(self.handle, descriptor))
        self._descriptor = descriptor[0]
        self.endpoint: Any = None
        self.messages: list[bytes] = []  # active messages
        self.forms: set[str] = set()  # the forms in which they arrived
        self.requests: list[Any] = []  # pending connection requests
        self.lost = False
        self._keep: list[Any] = []
        self._nothing = self.ffi.new("ucp_request_param_t *")
        self._callbacks()

    def _callbacks(self) -> None:
        ffi = self.ffi

        @ffi.callback("ucp_am_recv_callback_t")  # type: ignore[untyped-decorator]
        def message(arg: Any, header: Any, header_length: int, data: Any, length: int, param: Any) -> int:
            assert not header_length
            assert param.recv_attr & c.AM_RECV_REPLY_EP, "the reference would find no endpoint to reply to"
            if param.recv_attr & c.AM_RECV_RNDV:
                self.forms.add("rendezvous")
                memory = bytearray(length)
                view = ffi.from_buffer(memory)
                request = self.lib.ucp_am_recv_data_nbx(self.handle, data, view, length, self._nothing)
                self._announced.append((request, memory, view))
                return c.INPROGRESS if self.ucp.status(request) == c.INPROGRESS else c.OK
            self.forms.add("kept" if param.recv_attr & c.AM_RECV_DATA else "inline")
            self.messages.append(bytes(ffi.buffer(data, length)))
            return c.OK

        @ffi.callback("ucp_err_handler_cb_t")  # type: ignore[untyped-decorator]
        def lost(arg: Any, endpoint: Any, status: int) -> None:
            self.lost = True

        @ffi.callback("ucp_listener_conn_callback_t")  # type: ignore[untyped-decorator]
        def requested(request: Any, arg: Any) -> None:
            self.requests.append(request)

        self._announced: list[tuple[Any, bytearray, Any]] = []
        self._message, self._lost, self._requested = message, lost, requested
        handler = ffi.new("ucp_am_handler_param_t *")
        handler.field_mask, handler.id, handler.cb = c.AM_HANDLER_ID | c.AM_HANDLER_CB, 0, message
        self.ucp.check(self.lib.ucp_worker_set_am_recv_handler(self.handle, handler))

    # Connecting

    def listen(self) -> int:
        """Listen on 127.0.0.1, and return the port."""
        params = self.ffi.new("ucp_listener_params_t *")
        params.field_mask = c.LISTENER_PARAM_SOCK_ADDR | c.LISTENER_PARAM_CONN_HANDLER
        address = self._address(0)
        params.sockaddr.addr, params.sockaddr.addrlen = address, len(address)
        params.conn_cb = self._requested
        made = self.ffi.new("ucp_listener_h *")
        self.ucp.check(self.lib.ucp_listener_create(self.handle, params, made))
        self._listener = made[0]
        attributes = self.ffi.new("ucp_listener_attr_t *")
        attributes.field_mask = c.LISTENER_ATTR_SOCKADDR
        self.ucp.check(self.lib.ucp_listener_query(self._listener, attributes))
        return int.from_bytes(bytes(self.ffi.buffer(attributes.sockaddr.bytes, 4))[2:], "big")

    def stop_listening(self) -> None:
        self.lib.ucp_listener_destroy(self._listener)

    def accept(self, request: Any, mode: int | None) -> None:
        params = self.ffi.new("ucp_ep_params_t *")
        params.field_mask, params.conn_request = c.EP_PARAM_CONN_REQUEST, request
        self._connect(params, mode)

    def connect(self, port: int, mode: int | None) -> None:
        """Connect to `port`. With `mode` None, UCX uses its default error mode, which is none."""
        params = self.ffi.new("ucp_ep_params_t *")
        params.field_mask = c.EP_PARAM_SOCK_ADDR | c.EP_PARAM_FLAGS
        params.flags = c.EP_CLIENT_SERVER | c.EP_SEND_CLIENT_ID
        address = self._address(port)
        params.sockaddr.addr, params.sockaddr.addrlen = address, len(address)
        self._connect(params, mode)

    def _connect(self, params: Any, mode: int | None) -> None:
        params.field_mask |= c.EP_PARAM_ERR_HANDLER
        params.err_cb = self._lost
        if mode is not None:
            params.field_mask |= c.EP_PARAM_ERR_MODE
            params.err_mode = mode
        made = self.ffi.new("ucp_ep_h *")
        self.ucp.check(self.lib.ucp_ep_create(self.handle, params, made))
        self.endpoint = made[0]

    def _address(self, port: int) -> Any:
        raw = struct.pack("=H2s4s8x", socket.AF_INET, port.to_bytes(2, "big"), socket.inet_aton("127.0.0.1"))
        return self.ffi.from_buffer(raw)

    # Time

    def progress(self) -> bool:
        moved = bool(self.lib.ucp_worker_progress(self.handle))
        for one in list(self._announced):
            request, memory, _ = one
            if not request or self.lib.ucp_request_check_status(request) != c.INPROGRESS:
                self._announced.remove(one)
                self.messages.append(bytes(memory))
        return moved

    def until(self, done: Callable[[], Any], patience: float = PATIENCE) -> None:
        """Make progress until `done`, or fail after `patience` seconds."""
        end = time.monotonic() + patience
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        while not done():
            assert time.monotonic() < end, "the peer keeps us waiting"
            if not self.progress() and self.lib.ucp_worker_arm(self.handle) == c.OK:
                poll.poll(20)

    def flush(self, seconds: float) -> None:
        """Make progress for some time, so that the last messages leave the process."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    # Messages

    def send_message(self, parts: Sequence[bytes], answerable: bool = True) -> Any:
        """Send an active message of id 0 in pieces, without a header, and return the request."""
        params = self.ffi.new("ucp_request_param_t *")
        params.op_attr_mask, params.datatype = c.OP_FLAGS | c.OP_DATATYPE, c.DATATYPE_IOV
        params.flags = c.AM_SEND_REPLY if answerable else 0
        pieces, count = self._pieces(parts)
        return self._sent(
            self.lib.ucp_am_send_nbx(self.endpoint, 0, self.ffi.NULL, 0, pieces, count, params), (parts, pieces)
        )

    def send_tagged(self, tag: int, parts: Sequence[bytes], sync: bool = False) -> Any:
        """Send a tagged message, and return the request."""
        params = self.ffi.new("ucp_request_param_t *")
        params.op_attr_mask, params.datatype = c.OP_DATATYPE, c.DATATYPE_IOV
        pieces, count = self._pieces(parts)
        send = self.lib.ucp_tag_send_sync_nbx if sync else self.lib.ucp_tag_send_nbx
        return self._sent(send(self.endpoint, pieces, count, tag, params), (parts, pieces))

    def _pieces(self, parts: Sequence[bytes]) -> tuple[Any, int]:
        views = [self.ffi.from_buffer(part) for part in parts]
        self._keep.append(views)
        return self.ffi.new("ucp_dt_iov_t[]", [(view, len(view)) for view in views]), len(views)

    def _sent(self, request: Any, keep: Any) -> Any:
        self._keep.append(keep)
        assert self.ucp.status(request) >= 0
        return request

    def done(self, request: Any) -> bool:
        """Return whether a request is complete."""
        return not request or self.lib.ucp_request_check_status(request) != c.INPROGRESS

    def probe(self, tag: int, mask: int) -> tuple[int, bytes] | None:
        """Receive the message that matches, if it has arrived."""
        info = self.ffi.new("ucp_tag_recv_info_t *")
        message = self.lib.ucp_tag_probe_nb(self.handle, tag, mask, 1, info)
        if not message:
            return None
        memory = bytearray(info.length)
        params = self.ffi.new("ucp_request_param_t *")
        params.op_attr_mask = c.NO_IMMEDIATE_COMPLETION
        view = self.ffi.from_buffer(memory) if memory else self.ffi.NULL
        request = self.lib.ucp_tag_msg_recv_nbx(self.handle, view, len(memory), message, params)
        self.until(lambda: self.done(request))
        return info.sender_tag, bytes(memory)

    def receive(self, tag: int = 0, mask: int = 0) -> tuple[int, bytes]:
        """Wait for a tagged message."""
        found: list[tuple[int, bytes]] = []

        def arrived() -> bool:
            one = self.probe(tag, mask)
            if one is not None:
                found.append(one)
            return bool(found)

        self.until(arrived)
        return found[0]

    # Closing

    def close_endpoint(self, force: bool = False) -> None:
        params = self.ffi.new("ucp_request_param_t *")
        if force:
            params.op_attr_mask, params.flags = c.OP_FLAGS, c.EP_CLOSE_FORCE
        request = self.lib.ucp_ep_close_nbx(self.endpoint, params)
        if self.ucp.status(request) == c.INPROGRESS:
            self.until(lambda: self.done(request))
        self.endpoint = None

    def close(self) -> None:
        self.lib.ucp_worker_destroy(self.handle)


def _read_one(worker: Worker) -> None:
    seen = len(worker.messages)
    worker.until(lambda: len(worker.messages) > seen or worker.probe(0, 0))


def play(worker: Worker, steps: list[list[Any]], say: Callable[[str], None]) -> None:
    """Run the scripted steps. See the module."""
    for name, *rest in steps:
        if name == "am":
            request = worker.send_message([bytes.fromhex(rest[0])])
            worker.until(partial(worker.done, request))
        elif name == "tag":
            worker.send_tagged(rest[0], [bytes.fromhex(rest[1])])
            worker.progress()
        elif name == "read":
            for _ in range(rest[0]):
                _read_one(worker)
        elif name == "stream":
            worker.until(lambda: any(one[0] == 0 for one in worker.messages))
        elif name == "reached":
            worker.flush(0.05)
            say("reached")
        elif name == "hold":
            worker.until(lambda: worker.lost, 1e6)
        elif name == "sleep":
            signal.pause()
        else:
            raise ValueError(name)


def main() -> None:
    def say(line: str) -> None:
        print(line, flush=True)

    role, where = sys.argv[1:]
    context = Context()
    steps = json.loads(sys.stdin.readline())
    worker = Worker(context)
    if role == "server":
        listening = Worker(context)
        port = listening.listen()
        extra = "&err_mode=none" if where == "none" else ""
        say(f"ucx://127.0.0.1:{port}?want_data={WANT}&free_data={FREE}{extra}")
        listening.until(lambda: listening.requests, 1e6)
        worker.accept(listening.requests[0], None)
    else:
        place, _, query = where.removeprefix("ucx://").partition("?")
        mode = None if "err_mode=none" in query else c.ERR_MODE_PEER
        worker.connect(int(place.rpartition(":")[2]), mode)
    play(worker, steps, say)


if __name__ == "__main__":
    main()
