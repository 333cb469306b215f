/* A reader of the dissociated protocol over tcp: and shm:, without Arrow. See docs/framing.md for the wire format.
 *
 * It returns the metadata of each message (the flatbuffer of an Arrow IPC Message) and its buffers, in order. Bodies
 * that come by address are not copied: buffers point into the memory of the server until dis_release.
 *
 *     dis_stream *stream;
 *     dis_message message;
 *     if (dis_open(&stream, uri, "ticket", 6, 60) == 0)
 *         while (dis_next(stream, &message) == 1) {
 *             ... message.metadata, message.buffers ...
 *             dis_release(stream, &message);
 *         }
 *     if (dis_error(stream)) fprintf(stderr, "%s\n", dis_error(stream));
 *     dis_close(stream);
 *
 * A stream belongs to one thread. Linux, little-endian, 64 bits. */
#ifndef DISSOCIATED_H
#define DISSOCIATED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct dis_stream dis_stream;

/* The type of a message: MessageHeader of Message.fbs. */
enum { DIS_SCHEMA = 1, DIS_DICTIONARY_BATCH = 2, DIS_RECORD_BATCH = 3, DIS_TENSOR = 4, DIS_SPARSE_TENSOR = 5 };

typedef struct {
    const uint8_t *data; /* NULL if the buffer has no bytes */
    uint64_t length;
    uint64_t offset; /* in a packed body */
} dis_buffer;

typedef struct {
    uint64_t sequence;
    int type;
    const uint8_t *metadata;
    size_t metadata_length;
    uint64_t body_length;  /* of the packed body */
    const uint8_t *packed; /* the packed body, or NULL if the body came by address */
    dis_buffer *buffers;   /* none for the sparse tensors of a packed body */
    size_t buffer_count;
    void *internal;
} dis_message;

/* Connect, and request the stream. Return 0, or -1 with an error. `*stream` is set in both cases; NULL means that there
 * is no memory. Calls fail if the server is silent for `timeout` seconds. */
int dis_open(dis_stream **stream, const char *uri, const void *ticket, size_t ticket_length, int timeout);

/* Return 1 with the next message, 0 at the end of the stream, or -1 with an error. */
int dis_next(dis_stream *stream, dis_message *message);

/* Return a copy of the message as in an Arrow IPC stream: prefix, metadata and packed body. The caller frees it with
 * free(). `*size` is set to its bytes. Return NULL if there is no memory, or if the message is a sparse tensor that came
 * by address, whose layout this library does not know. */
uint8_t *dis_encapsulate(const dis_message *message, size_t *size);

/* Release a message, once. Its pointers become invalid, and the server may reuse its memory. */
void dis_release(dis_stream *stream, dis_message *message);

/* Return the message of the error, or NULL if there is none. If the server broke a rule of docs/framing.md, its
 * name and a colon come first. */
const char *dis_error(const dis_stream *stream);

/* Return the code of the error that the server sent before it closed the connection, or 0. */
int dis_error_code(const dis_stream *stream);

/* Close the connection and free everything, messages that were not released included. */
void dis_close(dis_stream *stream);

#ifdef __cplusplus
}
#endif
#endif
