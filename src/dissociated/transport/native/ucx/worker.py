"""Contexts of UCX, one for each kind of place that a connection is in, and workers, which let UCX work."""

from __future__ import annotations

import ipaddress
import os
import resource
from typing import Any, NamedTuple

from dissociated.base.fork import ProcessBound
from dissociated.base.once import once
from dissociated.errors import ForkedError, TransportError
from dissociated.memory.device.base import DeviceType
from dissociated.transport.native.threads import Waker
from dissociated.transport.native.ucx import _ucp as c
from dissociated.transport.native.ucx._ucp import Ucp, ucp
from dissociated.transport.native.ucx.handshake import client_id

#: The largest TCP segment that our contexts receive, and send to peers who have said that they receive it. UCX compares
#: nothing: what is larger than the peer's buffer is written beyond that.
SEGMENT = 1 << 18

#: Where Linux shows RDMA and NVIDIA's devices. UCX knows best how to use them; without them it has TCP alone.
_RDMA = "/sys/class/infiniband"
_HARDWARE = (_RDMA, "/dev/nvidiactl")

#: Kinds of devices, as UCX numbers their memory.
_DEVICES = {DeviceType.CUDA: c.MEMORY_TYPE_CUDA}
#: The first that was seen to find the context of a GPU by itself, and to be done with its copies when it says so.
_OLDEST_FOR_DEVICES = (1, 22)

#: The first that was seen not to crash where it gives up what it sends, and has no cache of registered memory.
_OLDEST_WITHOUT_CACHE = (1, 22)


class ContextKey(NamedTuple):
    """What a context depends on."""

    inet6: bool
    #: Whether the peer can only be on this host: looking at no other devices makes workers ten times as cheap.
    loopback: bool
    rma: bool
    #: Whether the peer has said that it receives segments as large as ours.
    large: bool
    #: Whether it may share memory with the peer, which then copies from it and into it by itself (err_mode=none).
    shared: bool
    pid: int


def context_key(address: str, rma: bool, large: bool, shared: bool) -> ContextKey:
    """The kind of place that a connection with this address is in, with or without one-sided access to memory."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return ContextKey(ip.version == 6, ip.is_loopback, rma, large, shared, os.getpid())


_inherited = False  # whether a parent of this process used UCX as this one was forked


class _Use(ProcessBound):
    """As long as it lasts, UCX has one thread for all of the process.

    In a child that is forked then, UCX takes that for its own, starts none, and never connects.
    """

    def __init__(self) -> None:
        self.over = False
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        global _inherited
        _inherited = _inherited or not self.over


def _check_process() -> None:
    """Raise ForkedError in a child of a process that used UCX."""
    if _inherited:
        raise ForkedError(
            "UCX was in use when this process was forked, and connects nowhere in it: start the process by spawn or "
            "forkserver, or open what goes over UCX after the fork alone; shm, tcp and tls can be used here"
        )


class Context(NamedTuple):
    """A context, the bytes of the largest TCP segment that it receives, 0 where the user has chosen that, for which
    kinds of devices it can write to their memory, by UCX's numbers of these, and what a forked child hears of it."""

    handle: Any
    segment: int
    memory_types: dict[DeviceType, int]
    use: _Use | None


@once
def context(where: ContextKey) -> Context:
    """A context, which lives as long as the process."""
    u = ucp()
    config = u.ffi.new("ucp_config_t **")
    u.check(u.lib.ucp_config_read(u.ffi.NULL, u.ffi.NULL, config), "reading the configuration of UCX")
    segment = 0 if "UCX_TCP_RX_SEG_SIZE" in os.environ else SEGMENT
    # UCX 1.22 frees a TCP lane that it still uses where the peer dies between `connect` and the first message on it,
    # but not where connecting does not block.
    settings = {"TCP_CONN_NB": "y"}
    if segment:
        settings["TCP_RX_SEG_SIZE"] = str(segment)
    if segment and where.large:
        settings["TCP_TX_SEG_SIZE"] = str(segment)  # of 8k, UCX's default, bodies in many pieces go at half speed
    if not any(map(os.path.exists, _HARDWARE)):
        if not where.shared:
            # Into the receiver's own memory, not by way of its segments. Never where a peer would write by itself.
            settings["RNDV_SCHEME"] = "put_zcopy"
        if u.numbers >= _OLDEST_WITHOUT_CACHE:
            # Registering costs nothing there, and memory in the cache is shared: what is under way of a connection
            # that is closed would wait for all others that send from there. See `UcxEndpoint.begin_close`.
            settings["RCACHE_ENABLE"] = "n"
    if where.inet6:
        settings["TCP_AF_PRIO"] = "inet6"
    if where.loopback:
        settings["NET_DEVICES"] = "lo"
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
    # UCX listens to RDMA devices in its thread for as long as there is a context for them.
    use = _Use() if os.path.exists(_RDMA) else None
    return Context(handle[0], segment, _memory_types(u, handle[0]), use)


def _memory_types(u: Ucp, handle: Any) -> dict[DeviceType, int]:
    if u.numbers < _OLDEST_FOR_DEVICES:
        return {}
    attributes = u.ffi.new("ucp_context_attr_t *")
    attributes.field_mask = c.CONTEXT_ATTR_MEMORY_TYPES
    u.check(u.lib.ucp_context_query(handle, attributes), "asking UCX for its memory types")
    return {device: number for device, number in _DEVICES.items() if attributes.memory_types >> number & 1}


#: Those that can connect two processes, as UCX_TLS names them.
_NETWORKS = {"all", "tcp", "ib", "rc", "rc_v", "rc_x", "ud", "ud_v", "ud_x", "dc", "dc_x", "srd"}


def _check_choice() -> None:
    """Raise TransportError where the environment leaves nothing to connect by: UCX would only say "unreachable"."""
    chosen = os.environ.get("UCX_TLS", "all").split(",")
    excluded = {chosen[0][1:], *chosen[1:]} if chosen[0].startswith("^") else set()
    if "tcp" in excluded or not (excluded or _NETWORKS.intersection(chosen)):
        raise TransportError(f"UCX_TLS={os.environ['UCX_TLS']} leaves out tcp, which connections over UCX need: add it")


#: Descriptors that have to be left for a worker: it and its first lanes take a third of them.
_DESCRIPTORS = 32


def _check_descriptors() -> None:
    """Raise TransportError where few descriptors are left: UCX may end the process where it gets none."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        left = most - len(os.listdir("/proc/self/fd"))
    except OSError:  # this takes one, too
        left = 0
    if left < _DESCRIPTORS:
        raise TransportError(
            f"connections over UCX are made while {_DESCRIPTORS} descriptors are left of the {most} that this process "
            "may have: raise that limit (ulimit -n), or close something"
        )


class Worker:
    """What makes progress, and the descriptor that tells when there is some to make."""

    def __init__(self, where: ContextKey, takes_runs: bool = False) -> None:
        """A client says by it whether it `takes_runs`."""
        _check_process()
        self.ucp = u = ucp()
        _check_choice()
        _check_descriptors()
        self.context = context(where)
        params = u.ffi.new("ucp_worker_params_t *")
        params.field_mask = c.WORKER_PARAM_THREAD_MODE | c.WORKER_PARAM_FLAGS | c.WORKER_PARAM_CLIENT_ID
        params.thread_mode = c.THREAD_MODE_SERIALIZED
        params.flags = c.WORKER_IGNORE_REQUEST_LEAK  # what a dead peer leaves behind in error mode none
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
        #: What was raised in a callback, for whoever lets this work.
        self.failure: BaseException | None = None

    def progress(self) -> bool:
        """Let UCX work for a moment. Whether anything happened. Raises what a callback has raised."""
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

    def sleep(self, waker: Waker, seconds: float) -> None:
        """Sleep until there is progress to be made, or `waker` is set, which it then is no more."""
        waker.sleep((self.descriptor,), seconds)

    def discard_arrived(self) -> None:
        """Throw away the tagged messages that have arrived and that nobody waits for."""
        u = self.ucp
        while message := u.lib.ucp_tag_probe_nb(self.handle, 0, 0, 1, self._info):
            discarding = u.lib.ucp_tag_msg_recv_nbx(self.handle, u.ffi.NULL, 0, message, self._plain)
            if u.status(discarding) == c.INPROGRESS:
                u.lib.ucp_request_free(discarding)

    def destroy(self) -> None:
        self.ucp.lib.ucp_worker_destroy(self.handle)
        self._use.over = True
