"""A binding to libucp for tests, written from UCX's documentation. It is independent of ours, which may have errors."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

DECLARATIONS = """
typedef signed char ucs_status_t;
typedef void *ucp_context_h, *ucp_worker_h, *ucp_ep_h, *ucp_listener_h, *ucp_conn_request_h, *ucp_tag_message_h;
typedef void ucp_config_t;
typedef struct { const void *addr; uint32_t addrlen; } ucs_sock_addr_t;
typedef struct { unsigned char bytes[128]; } ucs_sockaddr_storage;
typedef struct { void *buffer; size_t length; } ucp_dt_iov_t;

typedef struct {
    uint64_t field_mask;
    uint64_t features;
    size_t request_size;
    void (*request_init)(void *);
    void (*request_cleanup)(void *);
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps;
    size_t estimated_num_ppn;
    const char *name;
    size_t node_local_id;
} ucp_params_t;

typedef struct {
    uint64_t field_mask;
    int thread_mode;
    unsigned long cpu_mask[16];
    unsigned events;
    void *user_data;
    int event_fd;
    uint64_t flags;
    const char *name;
    size_t am_alignment;
    uint64_t client_id;
} ucp_worker_params_t;

typedef void (*ucp_listener_conn_callback_t)(ucp_conn_request_h, void *);
typedef struct {
    uint64_t field_mask;
    ucs_sock_addr_t sockaddr;
    void *accept_cb, *accept_arg;
    ucp_listener_conn_callback_t conn_cb;
    void *conn_arg;
} ucp_listener_params_t;
typedef struct { uint64_t field_mask; ucs_sockaddr_storage sockaddr; } ucp_listener_attr_t;
typedef struct {
    uint64_t field_mask;
    ucs_sockaddr_storage client_address;
    uint64_t client_id;
} ucp_conn_request_attr_t;

typedef void (*ucp_err_handler_cb_t)(void *, ucp_ep_h, ucs_status_t);
typedef struct {
    uint64_t field_mask;
    const void *address;
    int err_mode;
    ucp_err_handler_cb_t err_cb;
    void *err_arg;
    void *user_data;
    unsigned flags;
    ucs_sock_addr_t sockaddr;
    ucp_conn_request_h conn_request;
    const char *name;
    ucs_sock_addr_t local_sockaddr;
} ucp_ep_params_t;

typedef struct { uint64_t recv_attr; ucp_ep_h reply_ep; } ucp_am_recv_param_t;
typedef ucs_status_t (*ucp_am_recv_callback_t)(
    void *, const void *, size_t, void *, size_t, const ucp_am_recv_param_t *);
typedef struct {
    uint64_t field_mask;
    unsigned id;
    uint32_t flags;
    ucp_am_recv_callback_t cb;
    void *arg;
} ucp_am_handler_param_t;

typedef struct { uint64_t sender_tag; size_t length; } ucp_tag_recv_info_t;
typedef struct {
    uint32_t op_attr_mask;
    uint32_t flags;
    void *request;
    void *cb;
    uint64_t datatype;
    void *user_data;
    void *reply_buffer;
    int memory_type;
    void *recv_info;
    void *memh;
    uint64_t more[8];
} ucp_request_param_t;

ucs_status_t ucp_config_read(const char *, const char *, ucp_config_t **);
void ucp_config_release(ucp_config_t *);
ucs_status_t ucp_init_version(unsigned, unsigned, const ucp_params_t *, const ucp_config_t *, ucp_context_h *);
void ucp_cleanup(ucp_context_h);
ucs_status_t ucp_worker_create(ucp_context_h, const ucp_worker_params_t *, ucp_worker_h *);
void ucp_worker_destroy(ucp_worker_h);
unsigned ucp_worker_progress(ucp_worker_h);
ucs_status_t ucp_worker_get_efd(ucp_worker_h, int *);
ucs_status_t ucp_worker_arm(ucp_worker_h);
ucs_status_t ucp_worker_set_am_recv_handler(ucp_worker_h, const ucp_am_handler_param_t *);
ucs_status_t ucp_listener_create(ucp_worker_h, const ucp_listener_params_t *, ucp_listener_h *);
void ucp_listener_destroy(ucp_listener_h);
ucs_status_t ucp_listener_query(ucp_listener_h, ucp_listener_attr_t *);
ucs_status_t ucp_conn_request_query(ucp_conn_request_h, ucp_conn_request_attr_t *);
ucs_status_t ucp_ep_create(ucp_worker_h, const ucp_ep_params_t *, ucp_ep_h *);
void *ucp_ep_close_nbx(ucp_ep_h, const ucp_request_param_t *);
ucs_status_t ucp_request_check_status(void *);
void *ucp_am_send_nbx(
    ucp_ep_h, unsigned, const void *, size_t, const void *, size_t, const ucp_request_param_t *);
void *ucp_am_recv_data_nbx(ucp_worker_h, void *, void *, size_t, const ucp_request_param_t *);
void *ucp_tag_send_nbx(ucp_ep_h, const void *, size_t, uint64_t, const ucp_request_param_t *);
void *ucp_tag_send_sync_nbx(ucp_ep_h, const void *, size_t, uint64_t, const ucp_request_param_t *);
ucp_tag_message_h ucp_tag_probe_nb(ucp_worker_h, uint64_t, uint64_t, int, ucp_tag_recv_info_t *);
void *ucp_tag_msg_recv_nbx(ucp_worker_h, void *, size_t, ucp_tag_message_h, const ucp_request_param_t *);
"""

FEATURE_TAG, FEATURE_RMA, FEATURE_WAKEUP, FEATURE_STREAM, FEATURE_AM = (1 << bit for bit in (0, 1, 4, 5, 6))
PARAM_FEATURES = 1 << 0
WORKER_PARAM_THREAD_MODE, WORKER_PARAM_FLAGS = 1 << 0, 1 << 5
THREAD_MODE_SERIALIZED, WORKER_IGNORE_REQUEST_LEAK = 1, 1 << 0
LISTENER_PARAM_SOCK_ADDR, LISTENER_PARAM_CONN_HANDLER, LISTENER_ATTR_SOCKADDR = 1 << 0, 1 << 2, 1 << 0
CONN_REQUEST_CLIENT_ID = 1 << 1
EP_PARAM_ERR_MODE, EP_PARAM_ERR_HANDLER, EP_PARAM_SOCK_ADDR, EP_PARAM_FLAGS = 1 << 1, 1 << 2, 1 << 4, 1 << 5
EP_PARAM_CONN_REQUEST = 1 << 6
EP_CLIENT_SERVER, EP_SEND_CLIENT_ID, EP_CLOSE_FORCE = 1 << 0, 1 << 2, 1 << 0
ERR_MODE_PEER = 1
OP_DATATYPE, OP_FLAGS, NO_IMMEDIATE_COMPLETION, DATATYPE_IOV = 1 << 3, 1 << 4, 1 << 16, 2
AM_SEND_REPLY = 1 << 0
AM_HANDLER_ID, AM_HANDLER_CB = 1 << 0, 1 << 2
AM_RECV_REPLY_EP, AM_RECV_DATA, AM_RECV_RNDV = 1 << 0, 1 << 16, 1 << 17
OK, INPROGRESS = 0, 1


class Ucx:
    """The loaded library libucp."""

    def __init__(self) -> None:
        import cffi

        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(DECLARATIONS)
        # Keep UCX from handling signals and from printing to standard output.
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"DEBUG_SIGNO": "0", "HANDLE_ERRORS": "none", "LOG_LEVEL": "fatal"}.items():
                patch.setenv(f"UCX_{name}", os.environ.get(f"UCX_{name}", value))
            self.lib: Any = self.ffi.dlopen(_path())

    def status(self, pointer: Any) -> int:
        """Return the status of a call that may give a request: OK, in progress, or an error below 0."""
        number = int(self.ffi.cast("intptr_t", pointer))
        return number if -100 <= number <= 0 else INPROGRESS

    def check(self, status: int) -> None:
        """Fail if `status` is an error."""
        assert status >= 0, f"UCX's error {status}"


@cache
def ucx() -> Ucx:
    """Return the library, loaded once per process."""
    return Ucx()


def _path() -> str:
    """Return the file that dissociated opens, too: two copies of UCX in one process disturb each other."""
    chosen = os.environ.get("DISSOCIATED_UCX_LIBRARY")
    if chosen:
        return chosen
    wheel = find_spec("libucx")
    assert wheel is not None
    return next(str(Path(place, "lib", "libucp.so.0")) for place in wheel.submodule_search_locations or ())
