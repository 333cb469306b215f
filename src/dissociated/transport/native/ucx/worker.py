"""UCX contexts, of which each kind of connection has one, and workers, which drive connections."""

from __future__ import annotations

import ipaddress
import os
import resource
from typing import Any, NamedTuple

from dissociated.base.fork import ProcessBound
from dissociated.base.once import once
from dissociated.errors import ForkedError, TransportError
from dissociated.memory.device.base import DeviceType
from dissociated.transport.native.ucx import libucp as c
from dissociated.transport.native.ucx.handshake import client_id
from dissociated.transport.native.ucx.libucp import RDMA, Ucp, has_hardware, ucp

#: Size in bytes of the largest TCP segment that our contexts receive, and that they send to peers that declare to
#: receive it. UCX does not check the size: a larger segment overruns the peer's buffer.
SEGMENT = 1 << 18

#: UCX's numbers of the memory types of devices.
_DEVICES = {DeviceType.CUDA: c.MEMORY_TYPE_CUDA}
#: The first version known to find the context of a GPU, and to have ended its copies when it reports them as ended.
_OLDEST_FOR_DEVICES = (1, 22)

#: The first version known not to crash when it cancels sends without a cache of registered memory.
_OLDEST_WITHOUT_CACHE = (1, 22)


class ContextKey(NamedTuple):
    """The properties of a connection that determine its context."""

    inet6: bool
    #: Whether the peer must be on this host. Workers that use no other network devices cost a tenth.
    loopback: bool
    rma: bool
    #: Whether the peer has declared that it receives segments of size SEGMENT.
    large: bool
    #: Whether the two processes may share memory, and copy from and into each other's memory (err_mode=none).
    shared: bool
    pid: int


def context_key(address: str, rma: bool, large: bool, shared: bool) -> ContextKey:
    """Return the key of the context for a connection.

    Args:
        address: The IP address of the server, which may have a scope.
        rma: Whether the connection allows one-sided access to memory.
        large: Whether the peer receives segments of size SEGMENT.
        shared: Whether the two processes may share memory.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    return ContextKey(ip.version == 6, ip.is_loopback, rma, large, shared, os.getpid())


_inherited = False  # whether a parent of this process was using UCX when this process was forked


class _Use(ProcessBound):
    """A use of UCX by this process, during which UCX runs one thread for the whole process.

    In a child that is forked during that time, UCX assumes that the thread exists, starts none, and never connects.
    """

    def __init__(self) -> None:
        self.is_over = False
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        global _inherited
        _inherited = _inherited or not self.is_over


def _check_process() -> None:
    """Raise ForkedError in a child of a process that used UCX."""
    if _inherited:
        raise ForkedError(
            "UCX was in use when this process was forked, and does not work in it: start the process with spawn or "
            "forkserver, or use UCX only after the fork; shm, tcp and tls work here"
        )


class Context(NamedTuple):
    """A UCX context."""

    handle: Any
    segment: int  #: bytes of the largest TCP segment that it receives; 0 if the user has configured that
    memory_types: dict[DeviceType, int]  #: UCX's numbers of the device types into whose memory it can receive
    use: _Use | None  #: informs forked children that UCX was in use, if its thread depends on this context


@once
def context(where: ContextKey) -> Context:
    """Return the context for `where`, which is created on first use and lives as long as the process."""
    u = ucp()
    config = u.ffi.new("ucp_config_t **")
    u.check(u.lib.ucp_config_read(u.ffi.NULL, u.ffi.NULL, config), "reading the configuration of UCX")
    segment = 0 if "UCX_TCP_RX_SEG_SIZE" in os.environ else SEGMENT
    # If the peer dies between `connect` and the first message, UCX 1.22 frees a TCP lane that it still uses, unless it
    # connects without blocking.
    settings = {"TCP_CONN_NB": "y"}
    if segment:
        settings["TCP_RX_SEG_SIZE"] = str(segment)
    if segment and where.large:
        settings["TCP_TX_SEG_SIZE"] = str(segment)  # UCX's default of 8k halves the speed of bodies in many pieces
    if not has_hardware():
        if not where.shared:
            # Writes directly into the receiver's memory. Not with shared memory, where the peer itself would write.
            settings["RNDV_SCHEME"] = "put_zcopy"
            # A worker would prepare 4 MB of shared memory, which it never uses in error mode peer.
            settings["TLS"] = "tcp"
        if u.numbers >= _OLDEST_WITHOUT_CACHE:
            # Registering memory costs nothing for TCP, and connections share memory in the cache: sends of a closed
            # connection would wait for all others that send from it. See `UcxEndpoint.begin_close`.
            settings["RCACHE_ENABLE"] = "n"
    if where.inet6:
        settings["TCP_AF_PRIO"] = "inet6"
    if where.loopback:
        # There is one device. UCX would still read the table of routes a thousand times per connection, to prefer the
        # device of the default route.
        settings |= {"NET_DEVICES": "lo", "TCP_PREFER_DEFAULT": "n"}
    for name, value in settings.items():
        if f"UCX_{name}" not in os.environ:
            status = u.lib.ucp_config_modify(config[0], name.encode(), value.encode())
            u.check(status, f"setting UCX_{name}={value}")
    params = u.ffi.new("ucp_params_t *")
    params.field_mask = c.PARAM_FEATURES | c.PARAM_MT_WORKERS_SHARED
    params.features = c.FEATURE_TAG | c.FEATURE_AM | c.FEATURE_WAKEUP | (c.FEATURE_RMA if where.rma else 0)
    params.mt_workers_shared = 1
    handle = u.ffi.new("ucp_context_h *")
    status = u.lib.ucp_init_version(1, 12, params, config[0], handle)
    u.lib.ucp_config_release(config[0])
    u.check(status, "starting UCX")
    # While there is a context for RDMA devices, UCX's thread listens to them.
    use = _Use() if os.path.exists(RDMA) else None
    return Context(handle[0], segment, _memory_types(u, handle[0]), use)


def _memory_types(u: Ucp, handle: Any) -> dict[DeviceType, int]:
    if u.numbers < _OLDEST_FOR_DEVICES:
        return {}
    attributes = u.ffi.new("ucp_context_attr_t *")
    attributes.field_mask = c.CONTEXT_ATTR_MEMORY_TYPES
    u.check(u.lib.ucp_context_query(handle, attributes), "asking UCX for its memory types")
    return {device: number for device, number in _DEVICES.items() if attributes.memory_types >> number & 1}


#: The transports in UCX_TLS that can connect two processes.
_NETWORKS = {"all", "tcp", "ib", "rc", "rc_v", "rc_x", "ud", "ud_v", "ud_x", "dc", "dc_x", "srd"}


def _check_choice() -> None:
    """Raise TransportError if UCX_TLS excludes every usable transport: UCX would only report "unreachable"."""
    chosen = os.environ.get("UCX_TLS", "all").split(",")
    excluded = {chosen[0][1:], *chosen[1:]} if chosen[0].startswith("^") else set()
    if "tcp" in excluded or not (excluded or _NETWORKS.intersection(chosen)):
        raise TransportError(f"UCX_TLS={os.environ['UCX_TLS']} leaves out tcp, which connections over UCX need: add it")


#: Number of free descriptors that a new worker requires. The worker and its first lanes take a third of them.
_DESCRIPTORS = 32


def _check_descriptors() -> None:
    """Raise TransportError if too few descriptors are free: UCX may end the process if it gets none."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        available = most - len(os.listdir("/proc/self/fd"))
    except OSError:  # listing the directory needs a descriptor, and none is free
        available = 0
    if available < _DESCRIPTORS:
        raise TransportError(
            f"a connection over UCX needs {_DESCRIPTORS} free descriptors, and {available} of {most} are free: raise "
            "the limit (ulimit -n), or close files or connections"
        )


class Worker:
    """A UCX worker, which drives connections, and the descriptor that is readable when it has work to do."""

    def __init__(self, where: ContextKey, takes_runs: bool = False) -> None:
        """Create a worker in the context for `where`.

        Args:
            where: The key of the context.
            takes_runs: Whether the client id of the worker declares that the client takes runs.

        Raises:
            TransportError: UCX cannot be used, or too few descriptors are free.
            ForkedError: UCX was in use when this process was forked.
        """
        _check_process()
        self.ucp = u = ucp()
        _check_choice()
        _check_descriptors()
        self.context = context(where)
        params = u.ffi.new("ucp_worker_params_t *")
        params.field_mask = c.WORKER_PARAM_THREAD_MODE | c.WORKER_PARAM_FLAGS | c.WORKER_PARAM_CLIENT_ID
        params.thread_mode = c.THREAD_MODE_SERIALIZED
        params.flags = c.WORKER_IGNORE_REQUEST_LEAK  # in error mode none, a dead peer leaves requests behind
        params.client_id = client_id(self.context.segment, takes_runs)
        worker = u.ffi.new("ucp_worker_h *")
        self._use = _Use()
        u.check(u.lib.ucp_worker_create(self.context.handle, params, worker), "creating a worker")
        self.handle = worker[0]
        descriptor = u.ffi.new("int *")
        u.check(u.lib.ucp_worker_get_efd(self.handle, descriptor), "creating a worker")
        self.descriptor: int = descriptor[0]
        self._info = u.ffi.new("ucp_tag_recv_info_t *")
        self._plain = u.ffi.new("ucp_request_param_t *")
        #: An exception from a callback, which the next `progress` raises.
        self.failure: BaseException | None = None

    def progress(self) -> bool:
        """Let UCX work for a moment. Return whether anything happened. Raise an exception from a callback, if any."""
        moved = bool(self.ucp.lib.ucp_worker_progress(self.handle))
        if self.failure is not None:
            try:
                raise self.failure
            finally:
                self.failure = None
        return moved

    def arm(self) -> bool:
        status = self.ucp.lib.ucp_worker_arm(self.handle)
        if status != c.BUSY:
            self.ucp.check(status, "waiting")
        return bool(status == c.OK)

    def discard_arrived(self) -> None:
        """Discard tagged messages that have arrived and will not be received."""
        u = self.ucp
        while message := u.lib.ucp_tag_probe_nb(self.handle, 0, 0, 1, self._info):
            discarding = u.lib.ucp_tag_msg_recv_nbx(self.handle, u.ffi.NULL, 0, message, self._plain)
            if u.status(discarding) == c.INPROGRESS:
                u.lib.ucp_request_free(discarding)

    def destroy(self) -> None:
        self.ucp.lib.ucp_worker_destroy(self.handle)
        self._use.is_over = True
