"""The binding to libucp: its definitions, how to find it, and how to read its statuses.

It uses cffi in ABI mode, so that no compiler is needed. Parsing the definitions takes 70 ms, loading libucp 400 ms. The
definitions fit UCX 1.13 to 1.22 if every struct is zeroed, because field masks select the fields that UCX reads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dissociated.base.once import once
from dissociated.errors import TransportError
from dissociated.transport.native.library import Library

LIBRARY = Library("ucx", "UCX", "libucp.so.0", "DISSOCIATED_UCX_LIBRARY")

DEFINITIONS = """
typedef int8_t ucs_status_t;  // a packed enum
typedef struct ucp_context *ucp_context_h;
typedef struct ucp_config ucp_config_t;
typedef struct ucp_worker *ucp_worker_h;
typedef struct ucp_ep *ucp_ep_h;
typedef struct ucp_listener *ucp_listener_h;
typedef struct ucp_conn_request *ucp_conn_request_h;
typedef struct ucp_recv_desc *ucp_tag_message_h;
typedef struct ucp_mem *ucp_mem_h;
typedef struct ucp_rkey *ucp_rkey_h;
typedef uint64_t ucp_tag_t;

typedef struct { const void *addr; uint32_t addrlen; } ucs_sock_addr_t;
typedef struct { uint8_t bytes[128]; } sockaddr_storage_t;
typedef struct { unsigned long bits[16]; } ucs_cpu_set_t;
typedef struct { const void *buffer; size_t length; } ucp_dt_iov_t;

typedef struct {
    uint64_t field_mask, features;
    size_t request_size;
    void *request_init, *request_cleanup;
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps, estimated_num_ppn;
    const char *name;
    size_t node_local_id;
} ucp_params_t;

typedef struct {
    uint64_t field_mask;
    size_t request_size;
    int thread_mode;
    uint64_t memory_types;
    char name[32];
    size_t device_counter_size;
} ucp_context_attr_t;

typedef struct {
    uint64_t field_mask;
    int thread_mode;
    ucs_cpu_set_t cpu_mask;
    unsigned events;
    void *user_data;
    int event_fd;
    uint64_t flags;
    const char *name;
    size_t am_alignment;
    uint64_t client_id;
} ucp_worker_params_t;

typedef void (*ucp_err_handler_cb_t)(void *arg, ucp_ep_h ep, ucs_status_t status);
typedef struct {
    uint64_t field_mask;
    const void *address;
    int err_mode;
    struct { ucp_err_handler_cb_t cb; void *arg; } err_handler;
    void *user_data;
    unsigned flags;
    ucs_sock_addr_t sockaddr;
    ucp_conn_request_h conn_request;
    const char *name;
    ucs_sock_addr_t local_sockaddr;
} ucp_ep_params_t;

typedef void (*ucp_listener_conn_callback_t)(ucp_conn_request_h request, void *arg);
typedef struct {
    uint64_t field_mask;
    ucs_sock_addr_t sockaddr;
    struct { void *cb, *arg; } accept_handler;
    struct { ucp_listener_conn_callback_t cb; void *arg; } conn_handler;
} ucp_listener_params_t;
typedef struct { uint64_t field_mask; sockaddr_storage_t sockaddr; } ucp_listener_attr_t;
typedef struct { uint64_t field_mask; sockaddr_storage_t client_address; uint64_t client_id; } ucp_conn_request_attr_t;

typedef struct { uint64_t recv_attr; ucp_ep_h reply_ep; } ucp_am_recv_param_t;
typedef ucs_status_t (*ucp_am_recv_callback_t)(
    void *arg, const void *header, size_t header_length, void *data, size_t length, const ucp_am_recv_param_t *param);
typedef struct {
    uint64_t field_mask;
    unsigned id;
    uint32_t flags;
    ucp_am_recv_callback_t cb;
    void *arg;
} ucp_am_handler_param_t;

typedef struct { ucp_tag_t sender_tag; size_t length; } ucp_tag_recv_info_t;
typedef struct {
    uint32_t op_attr_mask, flags;
    void *request, *cb;
    uint64_t datatype;
    void *user_data, *reply_buffer;
    int memory_type;
    void *recv_info;
    ucp_mem_h memh;
    uint64_t remote_datatype;
    const void *remote;
    size_t remote_count;
} ucp_request_param_t;

typedef struct {
    uint64_t field_mask;
    void *address;
    size_t length;
    unsigned flags, prot;
    int memory_type;
    const void *exported_memh_buffer;
} ucp_mem_map_params_t;

void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release);
const char *ucs_status_string(ucs_status_t status);
ucs_status_t ucp_config_read(const char *env_prefix, const char *filename, ucp_config_t **config);
ucs_status_t ucp_config_modify(ucp_config_t *config, const char *name, const char *value);
void ucp_config_release(ucp_config_t *config);
ucs_status_t ucp_init_version(
    unsigned major, unsigned minor, const ucp_params_t *params, const ucp_config_t *config, ucp_context_h *context);
ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t *attr);
void ucp_cleanup(ucp_context_h context);

ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t *params, ucp_worker_h *worker);
void ucp_worker_destroy(ucp_worker_h worker);
unsigned ucp_worker_progress(ucp_worker_h worker);
ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int *fd);
ucs_status_t ucp_worker_arm(ucp_worker_h worker);
ucs_status_t ucp_worker_set_am_recv_handler(ucp_worker_h worker, const ucp_am_handler_param_t *param);

ucs_status_t ucp_listener_create(ucp_worker_h worker, const ucp_listener_params_t *params, ucp_listener_h *listener);
void ucp_listener_destroy(ucp_listener_h listener);
ucs_status_t ucp_listener_query(ucp_listener_h listener, ucp_listener_attr_t *attr);
ucs_status_t ucp_listener_reject(ucp_listener_h listener, ucp_conn_request_h request);
ucs_status_t ucp_conn_request_query(ucp_conn_request_h request, ucp_conn_request_attr_t *attr);

// Those that return void * give NULL (done), an error (the last 100 addresses), or a request.
ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep);
void *ucp_ep_close_nbx(ucp_ep_h ep, const ucp_request_param_t *param);
void *ucp_ep_flush_nbx(ucp_ep_h ep, const ucp_request_param_t *param);

ucs_status_t ucp_request_check_status(void *request);
void ucp_request_free(void *request);

void *ucp_am_send_nbx(ucp_ep_h ep, unsigned id, const void *header, size_t header_length, const void *buffer,
                      size_t count, const ucp_request_param_t *param);
void *ucp_am_recv_data_nbx(ucp_worker_h worker, void *data, void *buffer, size_t count,
                           const ucp_request_param_t *param);
void *ucp_tag_send_nbx(ucp_ep_h ep, const void *buffer, size_t count, ucp_tag_t tag, const ucp_request_param_t *param);
ucp_tag_message_h ucp_tag_probe_nb(
    ucp_worker_h worker, ucp_tag_t tag, ucp_tag_t mask, int remove, ucp_tag_recv_info_t *info);
void *ucp_tag_msg_recv_nbx(ucp_worker_h worker, void *buffer, size_t count, ucp_tag_message_h message,
                           const ucp_request_param_t *param);

ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memh);
ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h memh);
ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memh, void **rkey, size_t *size);
void ucp_rkey_buffer_release(void *rkey);
ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h ep, const void *rkey_buffer, ucp_rkey_h *rkey);
void ucp_rkey_destroy(ucp_rkey_h rkey);
void *ucp_get_nbx(
    ucp_ep_h ep, void *buffer, size_t count, uint64_t address, ucp_rkey_h rkey, const ucp_request_param_t *param);
"""

FEATURE_TAG, FEATURE_RMA, FEATURE_WAKEUP, FEATURE_AM = 1 << 0, 1 << 1, 1 << 4, 1 << 6
PARAM_FEATURES, PARAM_MT_WORKERS_SHARED = 1 << 0, 1 << 5
CONTEXT_ATTR_MEMORY_TYPES, MEMORY_TYPE_CUDA = 1 << 2, 1
WORKER_PARAM_THREAD_MODE, WORKER_PARAM_FLAGS, WORKER_PARAM_CLIENT_ID = 1 << 0, 1 << 5, 1 << 8
WORKER_IGNORE_REQUEST_LEAK = 1 << 0
THREAD_MODE_SERIALIZED = 1
LISTENER_PARAM_SOCK_ADDR, LISTENER_PARAM_CONN_HANDLER = 1 << 0, 1 << 2
LISTENER_ATTR_SOCKADDR = 1 << 0
CONN_REQUEST_CLIENT_ADDR, CONN_REQUEST_CLIENT_ID = 1 << 0, 1 << 1
EP_PARAM_ERR_MODE, EP_PARAM_ERR_HANDLER, EP_PARAM_SOCK_ADDR, EP_PARAM_FLAGS = 1 << 1, 1 << 2, 1 << 4, 1 << 5
EP_PARAM_CONN_REQUEST = 1 << 6
EP_CLIENT_SERVER, EP_SEND_CLIENT_ID = 1 << 0, 1 << 2
ERR_MODE_NONE, ERR_MODE_PEER = 0, 1
EP_CLOSE_FORCE = 1 << 0
OP_DATATYPE, OP_FLAGS, OP_MEMORY_TYPE, DATATYPE_IOV = 1 << 3, 1 << 4, 1 << 6, 2
AM_SEND_REPLY = 1 << 0
AM_HANDLER_ID, AM_HANDLER_FLAGS, AM_HANDLER_CB, AM_HANDLER_ARG, AM_WHOLE_MESSAGE = 1, 2, 4, 8, 1
AM_RECV_RNDV = 1 << 17
MEM_ADDRESS, MEM_LENGTH, MEM_PROT = 1 << 0, 1 << 1, 1 << 3
MEM_LOCAL_READ, MEM_REMOTE_READ = 1 << 0, 1 << 8

OK, INPROGRESS = 0, 1
BUSY, CONNECTION_RESET = -15, -25

#: Pointers of this value or above are errors.
_ERRORS = 2**64 - 100
#: The first version that has every function above.
OLDEST_UCX = (1, 13)


class Ucp:
    """The loaded libucp."""

    def __init__(self) -> None:
        import cffi

        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(DEFINITIONS)
        with _tamed():
            self.path, self.lib = LIBRARY.open(self.ffi, installed_library())
        numbers = self.ffi.new("unsigned[3]")
        try:
            self.lib.ucp_get_version(numbers, numbers + 1, numbers + 2)
        except AttributeError:
            raise LIBRARY.wrong(self.path) from None
        self.version = f"{numbers[0]}.{numbers[1]}.{numbers[2]}"
        self.numbers: tuple[int, int] = numbers[0], numbers[1]
        LIBRARY.check_age(self.path, self.version, self.numbers, OLDEST_UCX)
        self._address = self.ffi.typeof("uintptr_t")

    def address(self, pointer: Any) -> int:
        """Return the address in `pointer` as a number."""
        return int(self.ffi.cast(self._address, pointer))

    def status(self, pointer: Any) -> int:
        """Return the status in the result of a UCX call that returns a pointer: OK, INPROGRESS, or an error below 0."""
        value = self.address(pointer)
        if not value:
            return OK
        return value - 2**64 if value >= _ERRORS else INPROGRESS

    def point(self, where: Any, sockaddr: bytes) -> Any:
        """Let `where` point to a socket address.

        Returns:
            The memory of the address, which the caller must keep alive while UCX uses `where`.
        """
        raw = self.ffi.from_buffer(sockaddr)
        where.addr, where.addrlen = raw, len(raw)
        return raw

    def raw(self, storage: Any) -> bytes:
        """Return the bytes of the socket address in `storage`."""
        return bytes(self.ffi.buffer(storage.bytes))

    def explain(self, status: int) -> str:
        """Return UCX's description of `status`."""
        text: bytes = self.ffi.string(self.lib.ucs_status_string(status))
        return text.decode()

    def check(self, status: int, action: str) -> None:
        """Raise TransportError, with a message that starts with `action`, if `status` is an error."""
        if status < 0:
            raise TransportError(f"{action}: UCX {self.version}: {self.explain(status)}")


@once
def ucp() -> Ucp:
    """Return the library, which is loaded on first use.

    Raises:
        TransportError: libucp or cffi is missing or cannot be used.
    """
    return LIBRARY.load(Ucp)


#: The directory in which Linux lists RDMA devices.
RDMA = "/sys/class/infiniband"


def has_hardware() -> bool:
    """Return whether this host has RDMA or NVIDIA devices, for which UCX has good defaults. Other hosts have TCP."""
    return any(map(os.path.exists, (RDMA, "/dev/nvidiactl")))


@contextmanager
def _tamed() -> Iterator[None]:
    """Keep UCX, while it is loaded, from replacing the program's signal handlers and writing to its standard output.

    Errors are raised as exceptions instead. Environment variables that the user has set are not changed.
    """
    settings = {"UCX_DEBUG_SIGNO": "0", "UCX_HANDLE_ERRORS": "none", "UCX_LOG_LEVEL": "fatal"}
    chosen = LIBRARY.variable in os.environ or "UCX_RCACHE_ENABLE" in os.environ
    if not (chosen or has_hardware()):
        # By default UCX rewrites the code of mmap and its like, to know when registered memory is freed, which takes
        # 300 ms. Only its cache of that memory needs it. Our contexts have none, from a version on that the wheel has.
        settings["UCX_MEM_MMAP_HOOK_MODE"] = "none"
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def installed_library() -> Path | None:
    """Return the libucp of the wheel libucx; None if it is not installed."""
    from importlib.util import find_spec

    wheel = find_spec("libucx")
    places = wheel.submodule_search_locations if wheel is not None else None
    return next((Path(place, "lib", LIBRARY.file) for place in places or ()), None)
