"""The binding to libfabric: its definitions, how to find it, and how to read its errors.

It uses cffi in ABI mode, so that no compiler is needed. Most calls of libfabric are inline functions over tables of
operations. The tables are declared here up to the last entry that is used; further entries do not matter, because only
libfabric creates the tables. These definitions fit 1.17 to 2.x, because the API of 1.17 is requested.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from dissociated.base.once import once
from dissociated.errors import TransportError
from dissociated.transport.native.library import Library
from dissociated.uri import ANY_INTERFACE

LIBRARY = Library("fabric", "libfabric", "libfabric.so.1", "DISSOCIATED_FABRIC_LIBRARY")

DEFINITIONS = """
typedef uint64_t fi_addr_t;
struct iovec { void *iov_base; size_t iov_len; };

struct fi_ops {
    size_t size;
    int (*close)(struct fid *fid);
    int (*bind)(struct fid *fid, struct fid *other, uint64_t flags);
    int (*control)(struct fid *fid, int command, void *arg);
};
struct fid { size_t fclass; void *context; struct fi_ops *ops; };

struct fi_tx_attr {
    uint64_t caps, mode, op_flags, msg_order, comp_order;
    size_t inject_size, size, iov_limit, rma_iov_limit;
    uint32_t tclass;
};
struct fi_rx_attr {
    uint64_t caps, mode, op_flags, msg_order, comp_order;
    size_t total_buffered_recv, size, iov_limit;
};
struct fi_ep_attr {
    int type;
    uint32_t protocol, protocol_version;
    size_t max_msg_size, msg_prefix_size, max_order_raw_size, max_order_war_size, max_order_waw_size;
    uint64_t mem_tag_format;
    size_t tx_ctx_cnt, rx_ctx_cnt, auth_key_size;
    uint8_t *auth_key;
};
struct fi_domain_attr {
    struct fid_domain *domain;
    char *name;
    int threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode;
    size_t mr_key_size, cq_data_size, cq_cnt, ep_cnt, tx_ctx_cnt, rx_ctx_cnt, max_ep_tx_ctx, max_ep_rx_ctx,
        max_ep_stx_ctx, max_ep_srx_ctx, cntr_cnt, mr_iov_limit;
    uint64_t caps, mode;
    uint8_t *auth_key;
    size_t auth_key_size, max_err_data, mr_cnt;
    uint32_t tclass;
};
struct fi_fabric_attr {
    struct fid_fabric *fabric;
    char *name, *prov_name;
    uint32_t prov_version, api_version;
};
struct fi_info {
    struct fi_info *next;
    uint64_t caps, mode;
    uint32_t addr_format;
    size_t src_addrlen, dest_addrlen;
    void *src_addr, *dest_addr;
    struct fid *handle;
    struct fi_tx_attr *tx_attr;
    struct fi_rx_attr *rx_attr;
    struct fi_ep_attr *ep_attr;
    struct fi_domain_attr *domain_attr;
    struct fi_fabric_attr *fabric_attr;
    struct fid_nic *nic;
};

struct fi_av_attr {
    int type, rx_ctx_bits;
    size_t count, ep_per_node;
    const char *name;
    void *map_addr;
    uint64_t flags;
};
struct fi_cq_attr {
    size_t size;
    uint64_t flags;
    int format, wait_obj, signaling_vector, wait_cond;
    struct fid_wait *wait_set;
};
struct fi_cq_tagged_entry { void *op_context; uint64_t flags; size_t len; void *buf; uint64_t data, tag; };
struct fi_cq_err_entry {
    void *op_context;
    uint64_t flags;
    size_t len;
    void *buf;
    uint64_t data, tag;
    size_t olen;
    int err, prov_errno;
    void *err_data;
    size_t err_data_size;
    uint8_t later_versions[256];
};

struct fi_ops_fabric {
    size_t size;
    int (*domain)(struct fid_fabric *fabric, struct fi_info *info, struct fid_domain **domain, void *context);
    void *passive_ep, *eq_open, *wait_open;
    int (*trywait)(struct fid_fabric *fabric, struct fid **fids, int count);
};
struct fid_fabric { struct fid fid; struct fi_ops_fabric *ops; uint32_t api_version; };

struct fi_ops_domain {
    size_t size;
    int (*av_open)(struct fid_domain *domain, struct fi_av_attr *attr, struct fid_av **av, void *context);
    int (*cq_open)(struct fid_domain *domain, struct fi_cq_attr *attr, struct fid_cq **cq, void *context);
    int (*endpoint)(struct fid_domain *domain, struct fi_info *info, struct fid_ep **ep, void *context);
};
struct fi_ops_mr {
    size_t size;
    int (*reg)(struct fid *fid, const void *buf, size_t len, uint64_t access, uint64_t offset, uint64_t requested_key,
               uint64_t flags, struct fid_mr **mr, void *context);
};
struct fid_domain { struct fid fid; struct fi_ops_domain *ops; struct fi_ops_mr *mr; };
struct fid_mr { struct fid fid; void *mem_desc; uint64_t key; };

struct fi_ops_av {
    size_t size;
    int (*insert)(struct fid_av *av, const void *addr, size_t count, fi_addr_t *fi_addr, uint64_t flags, void *context);
    void *insertsvc, *insertsym;
    int (*remove)(struct fid_av *av, fi_addr_t *fi_addr, size_t count, uint64_t flags);
};
struct fid_av { struct fid fid; struct fi_ops_av *ops; };

struct fi_ops_cq {
    size_t size;
    ssize_t (*read)(struct fid_cq *cq, void *buf, size_t count);
    void *readfrom;
    ssize_t (*readerr)(struct fid_cq *cq, struct fi_cq_err_entry *buf, uint64_t flags);
    void *sread, *sreadfrom, *signal;
    const char *(*strerror)(struct fid_cq *cq, int prov_errno, const void *err_data, char *buf, size_t len);
};
struct fid_cq { struct fid fid; struct fi_ops_cq *ops; };

struct fi_msg {
    const struct iovec *msg_iov;
    void **desc;
    size_t iov_count;
    fi_addr_t addr;
    void *context;
    uint64_t data;
};
struct fi_msg_tagged {
    const struct iovec *msg_iov;
    void **desc;
    size_t iov_count;
    fi_addr_t addr;
    uint64_t tag, ignore;
    void *context;
    uint64_t data;
};
struct fi_ops_ep {
    size_t size;
    ssize_t (*cancel)(struct fid *fid, void *context);
    int (*getopt)(struct fid *fid, int level, int name, void *value, size_t *length);
    int (*setopt)(struct fid *fid, int level, int name, const void *value, size_t length);
};
struct fi_ops_cm {
    size_t size;
    int (*setname)(struct fid *fid, void *addr, size_t addrlen);
    int (*getname)(struct fid *fid, void *addr, size_t *addrlen);
};
struct fi_ops_msg {
    size_t size;
    void *recv, *recvv;
    ssize_t (*recvmsg)(struct fid_ep *ep, const struct fi_msg *msg, uint64_t flags);
    ssize_t (*send)(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t dest_addr, void *context);
    ssize_t (*sendv)(struct fid_ep *ep, const struct iovec *iov, void **desc, size_t count, fi_addr_t dest_addr,
                     void *context);
};
struct fi_ops_rma {
    size_t size;
    ssize_t (*read)(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t src_addr, uint64_t addr,
                    uint64_t key, void *context);
};
struct fi_ops_tagged {
    size_t size;
    ssize_t (*recv)(struct fid_ep *ep, void *buf, size_t len, void *desc, fi_addr_t src_addr, uint64_t tag,
                    uint64_t ignore, void *context);
    void *recvv;
    ssize_t (*recvmsg)(struct fid_ep *ep, const struct fi_msg_tagged *msg, uint64_t flags);
    ssize_t (*send)(struct fid_ep *ep, const void *buf, size_t len, void *desc, fi_addr_t dest_addr, uint64_t tag,
                    void *context);
    ssize_t (*sendv)(struct fid_ep *ep, const struct iovec *iov, void **desc, size_t count, fi_addr_t dest_addr,
                     uint64_t tag, void *context);
};
struct fid_ep {
    struct fid fid;
    struct fi_ops_ep *ops;
    struct fi_ops_cm *cm;
    struct fi_ops_msg *msg;
    struct fi_ops_rma *rma;
    struct fi_ops_tagged *tagged;
};

uint32_t fi_version(void);
const char *fi_strerror(int errnum);
int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
               struct fi_info **info);
void fi_freeinfo(struct fi_info *info);
struct fi_info *fi_dupinfo(const struct fi_info *info);
int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
char *strdup(const char *text);
"""

MSG, RMA, TAGGED = 1 << 1, 1 << 2, 1 << 3
READ, SEND, RECV, REMOTE_READ = 1 << 8, 1 << 11, 1 << 10, 1 << 12
MULTI_RECV, PEEK, SOURCE = 1 << 16, 1 << 19, 1 << 57
CLAIM, DISCARD = 1 << 59, 1 << 58
EP_RDM = 3
MR_LOCAL, MR_VIRT_ADDR, MR_ALLOCATED, MR_PROV_KEY = 1 << 2, 1 << 4, 1 << 5, 1 << 6
THREAD_SAFE, THREAD_DOMAIN = 1, 3
CQ_FORMAT_TAGGED, WAIT_FD = 4, 3
AV_TABLE = 2
GETWAIT, ENABLE = 5, 6
OPT_MIN_MULTI_RECV = 0

EIO, EAGAIN, ENOMSG, EAVAIL = 5, 11, 42, 259

#: The requested version of the API, which every later version also supports.
API = 1 << 16 | 17
#: The first version whose provider tcp;ofi_rxm is sufficient.
OLDEST_LIBFABRIC = (1, 17)
#: Limit of operations in progress of an endpoint, in each direction. Libfabric's default takes 40 MB per endpoint.
QUEUE = 256
#: Sizes in bytes of the structures that libfabric copies to and from our memory, since version 1.17, on 64 bits.
SIZES = {"struct fi_cq_tagged_entry": 48, "struct fi_msg": 48, "struct fi_msg_tagged": 64, "struct fi_cq_attr": 40}


class Ofi:
    """The loaded libfabric."""

    def __init__(self) -> None:
        import cffi

        self.ffi: Any = cffi.FFI()
        self.ffi.cdef(DEFINITIONS)
        _set_environment()
        self.path, self.lib = LIBRARY.open(self.ffi, installed_library())
        try:
            number = self.lib.fi_version()
        except AttributeError:
            raise LIBRARY.wrong(self.path) from None
        version = number >> 16, number & 0xFFFF
        self.version = "{}.{}".format(*version)
        LIBRARY.check_age(self.path, self.version, version, OLDEST_LIBFABRIC)
        with _small_buffers(version):
            self._check_layouts()

    def explain(self, code: int) -> str:
        """Return libfabric's description of the error `code`."""
        text: bytes = self.ffi.string(self.lib.fi_strerror(abs(code)))
        return text.decode()

    def check(self, code: int, action: str) -> None:
        """Raise TransportError, with a message that starts with `action`, if `code` is an error."""
        if code < 0:
            raise TransportError(f"{action}: libfabric {self.version}: {self.explain(code)}")

    def find(self, provider: str, node: str, service: str | None, flags: int, rma: bool, action: str) -> Any:
        """Find a way to open an endpoint of `provider` at `node` and `service`.

        Returns:
            The first fi_info that libfabric offers. The caller must release it with fi_freeinfo.

        Raises:
            TransportError: libfabric offers none. The message starts with `action`.
        """
        ffi, lib = self.ffi, self.lib
        hints = lib.fi_dupinfo(ffi.NULL)
        hints.caps = MSG | TAGGED | (RMA if rma else 0)
        hints.ep_attr.type = EP_RDM
        hints.fabric_attr.prov_name = lib.strdup(provider.encode())
        hints.domain_attr.threading = THREAD_SAFE if rma else THREAD_DOMAIN  # with rma, connections share a domain
        hints.domain_attr.mr_mode = MR_LOCAL | MR_VIRT_ADDR | MR_PROV_KEY | MR_ALLOCATED
        hints.tx_attr.size = hints.rx_attr.size = QUEUE
        result = ffi.new("struct fi_info **")
        where = ffi.NULL if service is None else service.encode()
        # rxm has no endpoints on all interfaces. Given 0.0.0.0, it would take the loopback address. Given nothing, it
        # takes the first address of this host that others reach.
        chooses = node in ANY_INTERFACE and provider.endswith("ofi_rxm") and service is not None
        host = ffi.NULL if chooses else node.encode()
        code = lib.fi_getinfo(API, host, where, flags, hints, result)
        lib.fi_freeinfo(hints)
        self.check(code, action)
        return result[0]

    def close(self, opened: Any) -> None:
        """Close an object of libfabric: an endpoint, a queue, a domain or registered memory."""
        opened.fid.ops.close(self.ffi.addressof(opened.fid))

    def _check_layouts(self) -> None:
        """Raise TransportError if the structures of the loaded library differ from the definitions here.

        Fields that libfabric fills in are compared with their valid values, which detects a field at another offset.
        """
        ffi = self.ffi
        wrong = [name for name, size in SIZES.items() if ffi.sizeof(name) != size]
        hints = self.lib.fi_dupinfo(ffi.NULL)
        hints.caps = TAGGED
        hints.ep_attr.type, hints.fabric_attr.prov_name = EP_RDM, self.lib.strdup(b"tcp;ofi_rxm")
        infos = ffi.new("struct fi_info **")
        code = self.lib.fi_getinfo(API, ffi.NULL, ffi.NULL, 0, hints, infos)
        self.lib.fi_freeinfo(hints)
        if code < 0:
            raise TransportError(
                f"libfabric {self.version} ({self.path}) has no provider tcp;ofi_rxm: {self.explain(code)}"
            )
        info = infos[0]
        checks = {
            "fi_info": info.addr_format in (1, 2, 3) and info.src_addrlen in (16, 28) and not info.handle,
            "fi_ep_attr": info.ep_attr.type == EP_RDM and info.ep_attr.max_msg_size > 1 << 30,
            "fi_tx_attr": 1 <= info.tx_attr.iov_limit <= 256 and 1 <= info.tx_attr.rma_iov_limit <= 256,
            "fi_rx_attr": 1 <= info.rx_attr.iov_limit <= 256,
            "fi_domain_attr": info.domain_attr.mr_key_size in range(1, 65) and info.domain_attr.mr_iov_limit > 0,
            "fi_fabric_attr": info.fabric_attr.prov_name and ffi.string(info.fabric_attr.prov_name) == b"tcp;ofi_rxm",
        }
        wrong += [name for name, fits in checks.items() if not fits]
        self.lib.fi_freeinfo(info)
        if wrong:
            raise TransportError(
                f"libfabric {self.version} ({self.path}) has another layout of {', '.join(wrong)} than versions 1.17 "
                "to 2.5: let DISSOCIATED_FABRIC_LIBRARY name one of those"
            )


@once
def ofi() -> Ofi:
    """Return the library, which is loaded on first use.

    Raises:
        TransportError: libfabric or cffi is missing or cannot be used.
    """
    return LIBRARY.load(Ofi)


def _set_environment() -> None:
    """Set the environment variables that libfabric reads while it is loaded."""
    # Keeps a plug-in (libpsm) from replacing the signal handlers of the Python program while it is loaded.
    os.environ.setdefault("IPATH_NO_BACKTRACE", "1")
    os.environ.setdefault("HFI_NO_BACKTRACE", "1")
    # With the default of 128, an endpoint takes 40 ms to open, and 40 MB.
    os.environ.setdefault("FI_OFI_RXM_MSG_RX_SIZE", "64")
    # With the default of 16 kB, an endpoint clears 16 MB more. Larger messages take their own size.
    os.environ.setdefault("FI_TCP_MAX_RX_SIZE", "512")
    # Turns segmented messages off: closing while they arrive crashes in 2.5. Large messages are fetched instead.
    os.environ["FI_OFI_RXM_SAR_LIMIT"] = "0"
    os.environ["FI_OFI_RXM_EAGER_LIMIT"] = "16384"  # see FabricEndpoint.eager_limit


@contextmanager
def _small_buffers(version: tuple[int, int]) -> Iterator[None]:
    """Set the size of rxm's buffers while libfabric reads it, in the first fi_getinfo. Only version 1.17 needs that.

    The variable is deleted afterwards, so that child processes, which may use another version, do not inherit it.

    Each message that is not received yet takes a whole buffer, however small the message is. With the default of 16 kB,
    a peer that never stops sending costs hundreds of MB before that is noticed. Larger messages take their own size.
    With 1.22 and 2.5, messages larger than such a buffer never arrive; versions between 1.17 and 1.22 were not tried.
    """
    name = "FI_OFI_RXM_BUFFER_SIZE"
    if version != (1, 17) or name in os.environ:
        yield
        return
    os.environ[name] = "2048"
    try:
        yield
    finally:
        del os.environ[name]


def installed_library() -> Path | None:
    """Return the libfabric that the wheel mpich has put into lib/mpich of its prefix; None if it is not installed."""
    try:
        listed = files("mpich") or []
    except PackageNotFoundError:
        return None
    bundled = [Path(str(file.locate())).resolve() for file in listed if file.name == LIBRARY.file]
    of_mpich = Path(sys.prefix, "lib", "mpich", LIBRARY.file)
    return next((path for path in (*bundled, of_mpich) if path.exists()), None)
