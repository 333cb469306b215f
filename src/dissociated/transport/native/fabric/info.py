"""What libfabric offers for an endpoint, at a place and with a provider."""

from __future__ import annotations

from typing import Any

from dissociated.transport.native.fabric import _ofi as c
from dissociated.transport.native.fabric._ofi import Ofi

#: Operations that an endpoint has under way in each direction, at most; libfabric's default takes 40 MB for each.
QUEUE = 256


def find_info(ofi: Ofi, provider: str, node: str, service: str | None, flags: int, rma: bool, action: str) -> Any:
    """What libfabric offers first. The caller owns it (fi_freeinfo). Raises TransportError where that is nothing."""
    ffi, lib = ofi.ffi, ofi.lib
    hints = lib.fi_dupinfo(ffi.NULL)
    hints.caps = c.MSG | c.TAGGED | (c.RMA if rma else 0)
    hints.ep_attr.type = c.EP_RDM
    hints.fabric_attr.prov_name = lib.strdup(provider.encode())
    hints.domain_attr.threading = c.THREAD_SAFE if rma else c.THREAD_DOMAIN  # which may be shared
    hints.domain_attr.mr_mode = c.MR_LOCAL | c.MR_VIRT_ADDR | c.MR_PROV_KEY | c.MR_ALLOCATED
    hints.tx_attr.size = hints.rx_attr.size = QUEUE
    found = ffi.new("struct fi_info **")
    where = ffi.NULL if service is None else service.encode()
    code = lib.fi_getinfo(c.API, node.encode(), where, flags, hints, found)
    lib.fi_freeinfo(hints)
    ofi.check(code, action)
    return found[0]
