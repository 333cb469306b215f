"""Domains of libfabric, with which memory is registered, and the fi_info from which they are opened."""

from __future__ import annotations

import struct
import threading
from itertools import count
from typing import Any

from dissociated.transport.native.fabric import libfabric as c
from dissociated.transport.native.fabric.libfabric import Ofi
from dissociated.uri import ANY_INTERFACE

#: Limit of operations in progress of an endpoint, in each direction. Libfabric's default takes 40 MB per endpoint.
QUEUE = 256


def find_info(ofi: Ofi, provider: str, node: str, service: str | None, flags: int, rma: bool, action: str) -> Any:
    """Find a way to open an endpoint of `provider` at `node` and `service`.

    Returns:
        The first fi_info that libfabric offers. The caller must release it with fi_freeinfo.

    Raises:
        TransportError: if libfabric offers none. The message starts with `action`.
    """
    ffi, lib = ofi.ffi, ofi.lib
    hints = lib.fi_dupinfo(ffi.NULL)
    hints.caps = c.MSG | c.TAGGED | (c.RMA if rma else 0)
    hints.ep_attr.type = c.EP_RDM
    hints.fabric_attr.prov_name = lib.strdup(provider.encode())
    hints.domain_attr.threading = c.THREAD_SAFE if rma else c.THREAD_DOMAIN  # with rma, connections share a domain
    hints.domain_attr.mr_mode = c.MR_LOCAL | c.MR_VIRT_ADDR | c.MR_PROV_KEY | c.MR_ALLOCATED
    hints.tx_attr.size = hints.rx_attr.size = QUEUE
    result = ffi.new("struct fi_info **")
    where = ffi.NULL if service is None else service.encode()
    # rxm has no endpoints on all interfaces. Given 0.0.0.0, it would take the loopback address. Given nothing, it takes
    # the first address of this host that others reach.
    chooses = node in ANY_INTERFACE and provider.endswith("ofi_rxm") and service is not None
    host = ffi.NULL if chooses else node.encode()
    code = lib.fi_getinfo(c.API, host, where, flags, hints, result)
    lib.fi_freeinfo(hints)
    ofi.check(code, action)
    return result[0]


#: A key in a URI: whether addresses are virtual addresses of the server rather than offsets, and libfabric's key.
RMA_KEY = struct.Struct("<BQ")


def close_object(ffi: Any, opened: Any) -> None:
    """Close an object of libfabric: an endpoint, a queue, a domain or registered memory."""
    opened.fid.ops.close(ffi.addressof(opened.fid))


class Domain:
    """A fabric and a domain in it, with which memory is registered. The last endpoint that leaves it closes it."""

    def __init__(self, ofi: Ofi, info: Any) -> None:
        self._ffi = ofi.ffi
        self._lock = threading.Lock()
        self._users = 0
        null, action = ofi.ffi.NULL, "opening a domain"
        fabric, domain = ofi.ffi.new("struct fid_fabric **"), ofi.ffi.new("struct fid_domain **")
        ofi.check(ofi.lib.fi_fabric(info.fabric_attr, fabric, null), action)
        self.fabric = fabric[0]
        code = self.fabric.ops.domain(self.fabric, info, domain, null)
        if code < 0:
            close_object(ofi.ffi, self.fabric)
        ofi.check(code, action)
        self.domain = domain[0]
        self._keys = count(1)
        self._library = ofi

    def enter(self) -> None:
        """Count another endpoint that shares the domain."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Count a closed endpoint, and close the domain after the last one."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for opened in (self.domain, self.fabric):
                    close_object(self._ffi, opened)

    def register(self, memory: Any, access: int) -> Any:
        """Register `memory`, so that libfabric or peers can use it with the rights in `access`.

        Returns:
            The registration, which must be passed to `unregister` before the memory is released.
        """
        registered, null = self._ffi.new("struct fid_mr **"), self._ffi.NULL
        fid = self._ffi.addressof(self.domain.fid)
        code = self.domain.mr.reg(fid, memory, len(memory), access, 0, next(self._keys), 0, registered, null)
        self._library.check(code, "registering memory")
        return registered[0]

    def unregister(self, registered: Any) -> None:
        """End the access of libfabric and of peers to registered memory."""
        close_object(self._ffi, registered)
