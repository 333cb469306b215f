#define _GNU_SOURCE
#include "dissociated.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { UNTAGGED = 1, TAGGED = 2, REGION = 3, ABORT = 4, RUN = 5 };
enum { MAX_FREES = 8192, MAX_REGIONS = 4096, MAX_DESCRIPTORS = 253, MAX_CONTROL = 1 << 16 };
#define MAX_METADATA ((uint64_t)1 << 28)
#define MAX_BODY ((uint64_t)1 << 34)
#define MAX_RUN ((uint64_t)1 << 26)
#define MAX_WAITING ((uint64_t)1 << 20) /* messages */

static const uint8_t PREAMBLE[8] = {'D', 'I', 'S', 'S', 'O', 'C', 0, 1};

typedef struct {
    uint64_t base, size;
    uint8_t *memory;
} region;

/* A message that has arrived in part. */
typedef struct {
    uint8_t *metadata, *body;
    uint64_t metadata_length, body_length;
    int has_metadata, has_body, kind;
} slot;

struct dis_stream {
    int socket, code, has_end, has_schema, greeted;
    char error[512];
    uint64_t free_data, next, count; /* the count is known from the end of stream */
    int has_free_data;
    slot *slots; /* slots[i] is message number next + i */
    uint64_t slot_count;
    region regions[MAX_REGIONS];
    size_t region_count;
    int descriptors[MAX_DESCRIPTORS]; /* received, and still without their REGION */
    size_t descriptor_count;
    uint64_t frees[MAX_FREES]; /* not sent yet */
    size_t free_count;
};

static int fail(dis_stream *s, const char *format, ...) {
    va_list arguments;
    if (s->error[0]) return -1; /* the first error counts */
    va_start(arguments, format);
    vsnprintf(s->error, sizeof s->error, format, arguments);
    va_end(arguments);
    return -1;
}

static uint64_t u64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, 8);
    return value;
}

static uint32_t u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, 4);
    return value;
}

/* The URI */

static int hex(char c) {
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

/* Decode percent-encoded text of `length` bytes. Return -1 if it does not fit, or is invalid. */
static int decode(const char *text, size_t length, char *target, size_t size) {
    size_t used = 0;
    for (size_t at = 0; at < length; at++) {
        char c = text[at];
        if (c == '%') {
            if (at + 2 >= length || hex(text[at + 1]) < 0 || hex(text[at + 2]) < 0) return -1;
            c = (char)(hex(text[at + 1]) * 16 + hex(text[at + 2]));
            at += 2;
        }
        if (!c || used + 1 >= size) return -1;
        target[used++] = c;
    }
    target[used] = 0;
    return 0;
}

/* Return 1 and the value of a parameter, 0 if it is missing, or -1 if it is no uint64. */
static int parameter(const char *query, const char *name, uint64_t *value) {
    size_t length = strlen(name);
    for (const char *at = query; at && *at; at = strchr(at, '&'), at = at ? at + 1 : NULL) {
        if (strncmp(at, name, length) || at[length] != '=') continue;
        const char *digit = at + length + 1;
        uint64_t number = 0;
        if (*digit < '0' || *digit > '9') return -1;
        for (; *digit >= '0' && *digit <= '9'; digit++) {
            uint64_t more = (uint64_t)(*digit - '0');
            if (number > (UINT64_MAX - more) / 10) return -1;
            number = number * 10 + more;
        }
        if (*digit && *digit != '&') return -1;
        *value = number;
        return 1;
    }
    return 0;
}

static int connect_unix(dis_stream *s, const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) return fail(s, "the path of the socket is too long");
    strcpy(address.sun_path, path);
    s->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s->socket < 0 || connect(s->socket, (struct sockaddr *)&address, sizeof address))
        return fail(s, "cannot connect to %s: %s", path, strerror(errno));
    return 0;
}

static int connect_tcp(dis_stream *s, char *place) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    char *port = strrchr(place, ':'), *host = place;
    if (!port) return fail(s, "the URI has no port");
    *port++ = 0;
    if (*host == '[') { /* IPv6 */
        host++;
        host[strcspn(host, "]")] = 0;
    }
    int problem = getaddrinfo(host, port, &hints, &found);
    if (problem) return fail(s, "cannot find %s: %s", host, gai_strerror(problem));
    for (struct addrinfo *one = found; one; one = one->ai_next) {
        s->socket = socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (s->socket >= 0 && !connect(s->socket, one->ai_addr, one->ai_addrlen)) break;
        if (s->socket >= 0) close(s->socket);
        s->socket = -1;
    }
    freeaddrinfo(found);
    return s->socket < 0 ? fail(s, "cannot connect to %s:%s: %s", host, port, strerror(errno)) : 0;
}

/* Frames */

static int send_all(dis_stream *s, const void *data, size_t length) {
    for (const char *at = data; length;) {
        ssize_t sent = send(s->socket, at, length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) return fail(s, "cannot send: %s", strerror(errno));
        at += sent;
        length -= (size_t)sent;
    }
    return 0;
}

/* Send a TAGGED frame, with the preamble before the first. */
static int send_tagged(dis_stream *s, uint64_t tag, const void *data, uint64_t length) {
    size_t padded = (length + 7) & ~(size_t)7, head = s->greeted ? 0 : sizeof PREAMBLE;
    uint64_t words[2] = {(uint64_t)TAGGED << 56 | length, tag};
    uint8_t *frame = calloc(1, head + sizeof words + padded + 1);
    if (!frame) return fail(s, "no memory");
    memcpy(frame, PREAMBLE, head);
    memcpy(frame + head, words, sizeof words);
    memcpy(frame + head + sizeof words, data, length);
    if (!s->greeted) s->greeted = 1; /* 2 after the server's preamble has arrived */
    int result = send_all(s, frame, head + sizeof words + padded);
    free(frame);
    return result;
}

/* Read exactly `length` bytes. Return 1, 0 if the connection ended before the first, or -1. */
static int read_all(dis_stream *s, uint8_t *target, uint64_t length) {
    for (uint64_t at = 0; at < length;) {
        union {
            struct cmsghdr align;
            char space[CMSG_SPACE(MAX_DESCRIPTORS * sizeof(int))];
        } control;
        struct iovec vector = {target + at, length - at};
        struct msghdr header = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
        ssize_t got = recvmsg(s->socket, &header, MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail(s, errno == EAGAIN ? "the server was silent" : "cannot receive: %s", strerror(errno));
        for (struct cmsghdr *one = CMSG_FIRSTHDR(&header); one; one = CMSG_NXTHDR(&header, one)) {
            if (one->cmsg_level != SOL_SOCKET || one->cmsg_type != SCM_RIGHTS) continue;
            size_t count = (one->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < count; i++) {
                int descriptor;
                memcpy(&descriptor, CMSG_DATA(one) + i * sizeof(int), sizeof(int));
                if (s->descriptor_count < MAX_DESCRIPTORS)
                    s->descriptors[s->descriptor_count++] = descriptor;
                else
                    close(descriptor), fail(s, "region-descriptor: descriptors without regions");
            }
        }
        if (header.msg_flags & MSG_CTRUNC) return fail(s, "a descriptor was lost: too many are open");
        if (s->error[0]) return -1;
        if (!got) return at ? fail(s, "stream-whole: the connection ended within a frame") : 0;
        at += (uint64_t)got;
    }
    return 1;
}

/* Regions */

static int is_sealed(int descriptor, int required) {
    int seals = fcntl(descriptor, F_GET_SEALS); /* -1 if it is no memfd */
    return seals >= 0 && (seals & required) == required;
}

static int add_region(dis_stream *s, const uint8_t *payload, uint64_t length) {
    static const int seals[3] = {0, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE, F_SEAL_SHRINK | F_SEAL_GROW};
    if (length != 24 || !s->descriptor_count) return fail(s, "region-descriptor: a REGION without its descriptor");
    uint64_t base = u64(payload), size = u64(payload + 8), backing = u64(payload + 16);
    int descriptor = s->descriptors[0], result = -1;
    memmove(s->descriptors, s->descriptors + 1, --s->descriptor_count * sizeof(int));
    struct stat status;
    if (s->region_count == MAX_REGIONS) {
        fail(s, "region-count: more than %d regions", MAX_REGIONS);
    } else if (!base || size > UINT64_MAX - base + 1) {
        fail(s, "region-base: %llu", (unsigned long long)base);
    } else if (backing > 2) {
        fail(s, "region-backing: %llu", (unsigned long long)backing);
    } else if (fstat(descriptor, &status) || !S_ISREG(status.st_mode) || (uint64_t)status.st_size < size) {
        fail(s, "region-file: no file of %llu bytes", (unsigned long long)size);
    } else if (seals[backing] && !is_sealed(descriptor, seals[backing])) {
        fail(s, "region-seals: a memfd that is not sealed as announced");
    } else {
        result = 0;
    }
    for (size_t i = 0; !result && i < s->region_count; i++)
        // The end of a region may be 2**64, so no ends are compared.
        if (base - s->regions[i].base < s->regions[i].size || s->regions[i].base - base < size)
            result = fail(s, "region-overlap: at %llu", (unsigned long long)base);
    if (!result && size) {
        void *memory = mmap(NULL, size, PROT_READ, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
        if (memory == MAP_FAILED)
            result = fail(s, "cannot map %llu bytes: %s", (unsigned long long)size, strerror(errno));
        else
            s->regions[s->region_count++] = (region){base, size, memory};
    }
    close(descriptor);
    return result;
}

static const uint8_t *locate(const dis_stream *s, uint64_t address, uint64_t length) {
    for (size_t i = 0; i < s->region_count; i++) {
        const region *one = &s->regions[i];
        if (address >= one->base && address - one->base < one->size && length <= one->size - (address - one->base))
            return one->memory + (address - one->base);
    }
    return NULL;
}

/* The flatbuffer of a Message: only its type, the length of its body, and its buffers */

typedef struct {
    int type;
    uint64_t body_length, buffer_count;
    const uint8_t *buffers; /* pairs of offset and length */
} header;

/* Return the position of a field of the table at `table`, or 0 if it is missing. -1: the flatbuffer is damaged. */
static int64_t field(const uint8_t *data, uint64_t length, uint64_t table, int number, int size) {
    if (table + 4 > length) return -1;
    int64_t vtable = (int64_t)table - (int32_t)u32(data + table);
    if (vtable < 0 || (uint64_t)vtable + 4 > length) return -1;
    uint16_t vtable_size, offset;
    memcpy(&vtable_size, data + vtable, 2);
    if (4 + 2 * number + 2 > vtable_size) return 0;
    if ((uint64_t)vtable + vtable_size > length) return -1;
    memcpy(&offset, data + vtable + 4 + 2 * number, 2);
    if (!offset) return 0;
    return table + offset + (uint64_t)size <= length ? (int64_t)(table + offset) : -1;
}

/* Return the table or vector to which the field points, or 0. */
static uint64_t follow(const uint8_t *data, uint64_t length, int64_t at) {
    if (at <= 0) return 0;
    uint64_t target = (uint64_t)at + u32(data + at);
    return target + 4 <= length ? target : 0;
}

static int parse(const uint8_t *data, uint64_t length, header *h) {
    memset(h, 0, sizeof *h);
    if (length < 8 || u32(data) + 4ull > length) return -1;
    uint64_t message = u32(data);
    int64_t type = field(data, length, message, 1, 1), body = field(data, length, message, 3, 8);
    uint64_t table = follow(data, length, field(data, length, message, 2, 4));
    if (type <= 0 || body < 0 || !table) return -1;
    h->type = data[type];
    h->body_length = body ? u64(data + body) : 0;
    if (h->type < DIS_SCHEMA || h->type > DIS_SPARSE_TENSOR || h->body_length >> 63) return -1;
    if (h->type == DIS_SCHEMA || h->type == DIS_SPARSE_TENSOR) return 0;
    if (h->type == DIS_TENSOR) {
        int64_t at = field(data, length, table, 4, 16);
        h->buffers = at > 0 ? data + at : NULL;
        h->buffer_count = at > 0;
        return at > 0 ? 0 : -1;
    }
    if (h->type == DIS_DICTIONARY_BATCH && !(table = follow(data, length, field(data, length, table, 1, 4)))) return -1;
    int64_t at = field(data, length, table, 2, 4);
    if (!at) return 0;
    uint64_t vector = follow(data, length, at);
    if (!vector) return -1;
    h->buffer_count = u32(data + vector);
    h->buffers = data + vector + 4;
    return vector + 4 + 16 * h->buffer_count <= length ? 0 : -1;
}

/* Messages */

/* Return the slot of a message by the 32 bits of its number on the wire, or NULL with an error. */
static slot *slot_of(dis_stream *s, uint32_t number) {
    int32_t ahead = (int32_t)(number - (uint32_t)s->next);
    if (ahead < 0) return fail(s, "message-once: number %u came twice", number), NULL;
    if (s->has_end && s->next + (uint64_t)ahead >= s->count) return fail(s, "end-count: number %u is not below it", number), NULL;
    if ((uint64_t)ahead >= MAX_WAITING) return fail(s, "waiting-limit: too many messages wait"), NULL;
    if ((uint64_t)ahead >= s->slot_count) {
        uint64_t size = 2 * (uint64_t)ahead + 16;
        slot *grown = realloc(s->slots, size * sizeof(slot));
        if (!grown) return fail(s, "no memory"), NULL;
        memset(grown + s->slot_count, 0, (size - s->slot_count) * sizeof(slot));
        s->slots = grown;
        s->slot_count = size;
    }
    return &s->slots[ahead];
}

static uint8_t *copy_of(dis_stream *s, const uint8_t *data, uint64_t length) {
    uint8_t *copy = aligned_alloc(64, (length + 64) & ~(uint64_t)63);
    if (!copy)
        fail(s, "no memory for %llu bytes", (unsigned long long)length);
    else
        memcpy(copy, data, length);
    return copy;
}

static int take_untagged(dis_stream *s, const uint8_t *data, uint64_t length) {
    if (length < 5 || data[0] > 1) return fail(s, "metadata-prefix: an unknown untagged message");
    uint32_t number = u32(data + 1);
    if (data[0] == 0) {
        if (length != 5) return fail(s, "end-length: %llu bytes", (unsigned long long)length);
        if (s->has_end) return fail(s, "end-once: a second end of stream");
        uint64_t count = s->next + (uint32_t)(number - (uint32_t)s->next);
        for (uint64_t i = count - s->next; i < s->slot_count; i++)
            if (s->slots[i].has_metadata || s->slots[i].has_body) return fail(s, "end-count: a message is not below it");
        if (!count || count - s->next >= (uint64_t)1 << 31) return fail(s, "end-count: %u", number);
        s->has_end = 1;
        s->count = count;
        return 0;
    }
    slot *one = slot_of(s, number);
    if (!one) return -1;
    if (one->has_metadata) return fail(s, "message-once: metadata %u came twice", number);
    one->has_metadata = 1;
    one->metadata_length = length - 5;
    return (one->metadata = copy_of(s, data + 5, length - 5)) ? 0 : -1;
}

/* Store a body. The stream frees it if it is `owned`. */
static int take_tagged(dis_stream *s, uint64_t tag, uint8_t *data, uint64_t length, int owned) {
    slot *one = NULL;
    if (tag >> 32 & 0xffffff)
        fail(s, "tag-reserved: %llu", (unsigned long long)tag);
    else if (tag >> 56 > 1)
        fail(s, "tag-kind: %llu", (unsigned long long)tag >> 56);
    else if (s->has_schema && !(uint32_t)tag && s->next >> 31 == 0) { /* the schema is delivered already */
        if (owned) free(data);
        return length ? fail(s, "schema-body: it has %llu bytes", (unsigned long long)length) : 0;
    } else if ((one = slot_of(s, (uint32_t)tag)) && one->has_body)
        fail(s, "message-once: body %u came twice", (uint32_t)tag);
    if (s->error[0]) {
        if (owned) free(data);
        return -1;
    }
    one->has_body = 1;
    one->kind = (int)(tag >> 56);
    one->body_length = length;
    return (one->body = owned ? data : copy_of(s, data, length)) ? 0 : -1;
}

static int take_run(dis_stream *s, uint8_t *data, uint64_t length) {
    if (length < 24) return fail(s, "run-length: it is cut off");
    uint64_t n = u64(data), u = u64(data + 8), t = u64(data + 16);
    if (!n || n > length || u > length || t > length) return fail(s, "run-length: its sizes");
    if (n * u > length || n * t > length) return fail(s, "run-length: its sizes");
    uint64_t untagged = 24 + 8 * n, tagged = untagged + ((n * u + 7) & ~(uint64_t)7);
    if (tagged + ((n * t + 7) & ~(uint64_t)7) != length) return fail(s, "run-length: its sizes");
    for (uint64_t i = 0; i < n; i++)
        if (take_untagged(s, data + untagged + i * u, u) || take_tagged(s, u64(data + 24 + 8 * i), data + tagged + i * t, t, 0))
            return -1;
    return 0;
}

static int take_abort(dis_stream *s, const uint8_t *data, uint64_t length) {
    const uint8_t *zero = memchr(data, 0, length);
    char digits[6] = "";
    if (zero) {
        size_t rest = (size_t)(data + length - zero - 1);
        memcpy(digits, zero + 1, rest < 5 ? rest : 5);
        s->code = atoi(digits);
    }
    return fail(s, "the server gave up: %.*s", (int)(zero ? zero - data : (int64_t)length), (const char *)data);
}

static int read_frame(dis_stream *s) {
    uint8_t head[16];
    if (s->greeted == 1) {
        int got = read_all(s, head, 8);
        if (got == 1 && memcmp(head, PREAMBLE, 8)) return fail(s, "preamble: the server speaks another protocol");
        if (got < 1) return fail(s, "stream-whole: the server closed the connection");
        s->greeted = 2;
    }
    int got = read_all(s, head, 16);
    if (!got) return fail(s, "stream-whole: the server closed the connection early");
    if (got < 0) return -1;
    uint64_t word = u64(head), tag = u64(head + 8), length = word & 0xffffffffffffff, kind = word >> 56;
    const uint64_t limits[6] = {0, 5 + MAX_METADATA, MAX_BODY, MAX_CONTROL, MAX_CONTROL, MAX_RUN};
    if (kind < UNTAGGED || kind > RUN) return fail(s, "frame-kind: %llu", (unsigned long long)kind);
    if (tag && kind != TAGGED) return fail(s, "frame-tag: on a frame of kind %llu", (unsigned long long)kind);
    if (length > limits[kind]) return fail(s, "frame-length: %llu bytes", (unsigned long long)length);
    uint8_t *payload = aligned_alloc(64, (length + 64 + 7) & ~(uint64_t)63);
    if (!payload) return fail(s, "no memory for %llu bytes", (unsigned long long)length);
    if (length && (got = read_all(s, payload, (length + 7) & ~(uint64_t)7)) < 1) {
        free(payload);
        return fail(s, "stream-whole: the connection ended within a frame");
    }
    if (kind == TAGGED) return take_tagged(s, tag, payload, length, 1);
    int result = kind == UNTAGGED  ? take_untagged(s, payload, length)
                 : kind == REGION ? add_region(s, payload, length)
                 : kind == RUN    ? take_run(s, payload, length)
                                  : take_abort(s, payload, length);
    free(payload);
    return result;
}

/* Fill in the buffers of a message, each checked against the metadata and the regions. */
static int attach(dis_stream *s, dis_message *m, const slot *one, const header *h) {
    const uint8_t *list = one->body;
    uint64_t count = one->kind ? (one->body_length - 16) / 16 : h->buffer_count, sum = 0, padded = 0;
    if (one->kind && (one->body_length < 16 || one->body_length % 16 || u64(list + 8) != count))
        return fail(s, "list-length: %llu bytes", (unsigned long long)one->body_length);
    if (one->kind && h->type != DIS_SPARSE_TENSOR && count != h->buffer_count)
        return fail(s, "list-count: %llu pairs", (unsigned long long)count);
    if (!one->kind && one->body_length != h->body_length)
        return fail(s, "body-length: %llu bytes", (unsigned long long)one->body_length);
    if (!(m->buffers = calloc(count + 1, sizeof *m->buffers))) return fail(s, "no memory");
    m->buffer_count = count;
    for (uint64_t i = 0; i < count; i++) {
        dis_buffer *b = &m->buffers[i];
        if (h->buffers) b->offset = u64(h->buffers + 16 * i), b->length = u64(h->buffers + 16 * i + 8);
        if (h->buffers && b->length && (b->offset > h->body_length || b->length > h->body_length - b->offset))
            return fail(s, "metadata-message: a buffer leaves its body");
        if (!one->kind) {
            b->data = b->length ? one->body + b->offset : NULL;
            continue;
        }
        uint64_t address = u64(list + 16 + 16 * i), length = u64(list + 24 + 16 * i);
        if (h->buffers && length != b->length) return fail(s, "list-lengths: buffer %llu", (unsigned long long)i);
        b->length = length;
        if (length && !(b->data = locate(s, address, length)))
            return fail(s, "address-region: %llu", (unsigned long long)address);
        sum += length;
        padded += (length + 63) & ~(uint64_t)63;
    }
    uint64_t most = padded > h->body_length ? padded : h->body_length, total = one->kind ? u64(list) : 0;
    if (one->kind && total != sum && (total < sum || total > most))
        return fail(s, "list-total: %llu", (unsigned long long)total);
    return 0;
}

int dis_next(dis_stream *s, dis_message *m) {
    memset(m, 0, sizeof *m);
    if (s->error[0]) return -1;
    for (header h;;) {
        if (s->has_end && s->next == s->count) return 0;
        slot *one = s->slot_count ? s->slots : NULL;
        if (one && one->has_metadata) {
            if (parse(one->metadata, one->metadata_length, &h)) return fail(s, "metadata-message: it cannot be read");
            if (h.type == DIS_SCHEMA ? s->next != 0 : !s->next && h.type < DIS_TENSOR)
                return fail(s, "schema-first: message %llu", (unsigned long long)s->next);
            if (h.type == DIS_SCHEMA && one->has_body && one->body_length)
                return fail(s, "schema-body: it has %llu bytes", (unsigned long long)one->body_length);
            if (h.type == DIS_SCHEMA || one->has_body) {
                slot *taken = malloc(sizeof *taken);
                if (!taken) return fail(s, "no memory");
                *taken = *one;
                memmove(s->slots, s->slots + 1, --s->slot_count * sizeof(slot));
                *m = (dis_message){s->next++, h.type, taken->metadata, taken->metadata_length, 0, NULL, NULL, 0, taken};
                if (h.type == DIS_SCHEMA) return s->has_schema = 1;
                m->body_length = h.body_length;
                m->packed = taken->kind ? NULL : taken->body;
                return attach(s, m, taken, &h) ? -1 : 1;
            }
        }
        if (read_frame(s)) return -1;
    }
}

uint8_t *dis_encapsulate(const dis_message *m, size_t *size) {
    if (m->type == DIS_SPARSE_TENSOR && !m->packed) return NULL;
    size_t padded = (m->metadata_length + 7) & ~(size_t)7;
    uint32_t prefix[2] = {0xffffffff, (uint32_t)padded};
    uint8_t *bytes = calloc(1, *size = 8 + padded + m->body_length), *body = bytes ? bytes + 8 + padded : NULL;
    if (!bytes) return NULL;
    memcpy(bytes, prefix, 8);
    memcpy(bytes + 8, m->metadata, m->metadata_length);
    if (m->packed && m->body_length) memcpy(body, m->packed, m->body_length);
    for (size_t i = 0; !m->packed && i < m->buffer_count; i++)
        if (m->buffers[i].length) memcpy(body + m->buffers[i].offset, m->buffers[i].data, m->buffers[i].length);
    return bytes;
}

static void flush_frees(dis_stream *s) {
    if (s->free_count && s->has_free_data) send_tagged(s, s->free_data, s->frees, 8 * s->free_count);
    s->free_count = 0;
}

void dis_release(dis_stream *s, dis_message *m) {
    slot *one = m->internal;
    if (!one) return;
    for (size_t i = 0; one->kind && i < m->buffer_count; i++) {
        uint64_t address = u64(one->body + 16 + 16 * i);
        if (!address && !m->buffers[i].length) continue;
        if (s->free_count == MAX_FREES) flush_frees(s);
        s->frees[s->free_count++] = address;
    }
    /* A live stream waits for its memory, so frees are sent when nothing else has arrived. */
    char byte;
    if (s->free_count && recv(s->socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 1) flush_frees(s);
    free(m->buffers);
    free(one->metadata);
    free(one->body);
    free(one);
    memset(m, 0, sizeof *m);
}

int dis_open(dis_stream **out, const char *uri, const void *ticket, size_t ticket_length, int timeout) {
    dis_stream *s = *out = calloc(1, sizeof *s);
    if (!s) return -1;
    s->socket = -1;
    char place[512];
    uint64_t want_data;
    const char *query = strchr(uri, '?'), *start = strstr(uri, "://");
    if (!query || !start || start > query) return fail(s, "the URI is not SCHEME://PLACE?PARAMETERS");
    start += 3;
    if (decode(start, (size_t)(query - start), place, sizeof place)) return fail(s, "the URI cannot be decoded");
    if (parameter(++query, "want_data", &want_data) != 1) return fail(s, "the URI has no valid want_data");
    if ((s->has_free_data = parameter(query, "free_data", &s->free_data)) < 0) return fail(s, "free_data is invalid");
    int is_unix = !strncmp(uri, "shm:", 4);
    if (!is_unix && strncmp(uri, "tcp:", 4)) return fail(s, "the scheme is not tcp: or shm:");
    if (is_unix ? connect_unix(s, place) : connect_tcp(s, place)) return -1;
    struct timeval silence = {timeout, 0};
    setsockopt(s->socket, SOL_SOCKET, SO_RCVTIMEO, &silence, sizeof silence);
    setsockopt(s->socket, SOL_SOCKET, SO_SNDTIMEO, &silence, sizeof silence);
    return send_tagged(s, want_data, ticket, ticket_length);
}

const char *dis_error(const dis_stream *s) { return !s ? "no memory" : s->error[0] ? s->error : NULL; }

int dis_error_code(const dis_stream *s) { return s ? s->code : 0; }

void dis_close(dis_stream *s) {
    if (!s) return;
    if (s->socket >= 0) flush_frees(s), close(s->socket);
    for (size_t i = 0; i < s->descriptor_count; i++) close(s->descriptors[i]);
    for (size_t i = 0; i < s->region_count; i++) munmap(s->regions[i].memory, s->regions[i].size);
    for (uint64_t i = 0; i < s->slot_count; i++) free(s->slots[i].metadata), free(s->slots[i].body);
    free(s->slots);
    free(s);
}
