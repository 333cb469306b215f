"""What UCX calls, and the parameters that it is called with: one of each for the process."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from dissociated.base.once import once
from dissociated.protocol.close_reason import decode_reason
from dissociated.transport.native.ucx import _ucp as c
from dissociated.transport.native.ucx._ucp import Ucp, ucp


class Callbacks:
    """What UCX calls. Each gets the handle of the object that it concerns.

    Nothing that is raised gets through UCX, and a signal is handled at the first bytecode after its wait, which is one
    of these. So that object is told by `_failed`.
    """

    def __init__(self, u: Ucp) -> None:
        ffi = u.ffi

        def failed(kind: type[BaseException], error: BaseException, trace: TracebackType) -> None:
            ffi.from_handle(trace.tb_frame.f_locals["arg"])._failed(error)

        @ffi.callback("ucp_am_recv_callback_t", onerror=failed)  # type: ignore[untyped-decorator]
        def metadata(arg: Any, header: Any, header_length: int, data: Any, length: int, param: Any) -> int:
            return int(ffi.from_handle(arg)._metadata(data, length, param.recv_attr))

        @ffi.callback("ucp_am_recv_callback_t", onerror=failed)  # type: ignore[untyped-decorator]
        def abort(arg: Any, header: Any, header_length: int, data: Any, length: int, param: Any) -> int:
            if not param.recv_attr & c.AM_RECV_RNDV:
                ffi.from_handle(arg)._give_up(decode_reason(bytes(ffi.buffer(data, length))))
            return 0

        @ffi.callback("ucp_err_handler_cb_t", onerror=failed)  # type: ignore[untyped-decorator]
        def lost(arg: Any, endpoint: Any, status: int) -> None:
            ffi.from_handle(arg)._lose_by(status)

        @ffi.callback("ucp_listener_conn_callback_t", onerror=failed)  # type: ignore[untyped-decorator]
        def requested(request: Any, arg: Any) -> None:
            ffi.from_handle(arg)._requested(request)

        self.metadata, self.abort, self.lost, self.requested = metadata, abort, lost, requested


@once
def callbacks() -> Callbacks:
    return Callbacks(ucp())


@once
def params() -> tuple[Any, ...]:
    """The parameters that calls have: contiguous, in pieces, with FORCE; the same for active messages."""
    new = ucp().ffi.new
    plain, pieces, force, am, am_pieces = (new("ucp_request_param_t *") for _ in range(5))
    pieces.op_attr_mask, pieces.datatype = c.OP_DATATYPE, c.DATATYPE_IOV
    force.op_attr_mask, force.flags = c.OP_FLAGS, c.EP_CLOSE_FORCE
    am.op_attr_mask, am.flags = c.OP_FLAGS, c.AM_SEND_REPLY
    am_pieces.op_attr_mask, am_pieces.flags = c.OP_FLAGS | c.OP_DATATYPE, c.AM_SEND_REPLY
    am_pieces.datatype = c.DATATYPE_IOV
    return plain, pieces, force, am, am_pieces
