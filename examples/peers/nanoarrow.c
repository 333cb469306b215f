/* Read a stream with the library into nanoarrow, and print the number of rows and nulls of each column.
 *
 *     cc -o count nanoarrow.c dissociated.c $NANOARROW     # the sources of nanoarrow with IPC, or its libraries
 *     ./count "tcp://127.0.0.1:4711?want_data=..." TICKET */
#include "dissociated.h"

#include <nanoarrow/nanoarrow_ipc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    dis_stream *stream;
    uint8_t *bytes; /* the current message, as in an Arrow IPC stream */
    size_t size, at;
} source;

static ArrowErrorCode read_bytes(struct ArrowIpcInputStream *stream, uint8_t *target, int64_t most, int64_t *read,
                                 struct ArrowError *error) {
    source *from = stream->private_data;
    dis_message message;
    int found = from->at < from->size ? 0 : dis_next(from->stream, &message);
    if (found < 0) return ArrowErrorSet(error, "%s", dis_error(from->stream)), EIO;
    if (found) {
        free(from->bytes), from->at = 0;
        if (!(from->bytes = dis_encapsulate(&message, &from->size))) return ENOMEM;
        dis_release(from->stream, &message);
    }
    size_t rest = from->size - from->at; /* 0 at the end of the stream */
    *read = rest < (size_t)most ? (int64_t)rest : most;
    if (*read) memcpy(target, from->bytes + from->at, (size_t)*read);
    from->at += (size_t)*read;
    return NANOARROW_OK;
}

static void release(struct ArrowIpcInputStream *stream) { stream->release = NULL; }

int main(int count, char **arguments) {
    if (count != 3) return fprintf(stderr, "usage: count URI TICKET\n"), 2;
    source from = {0};
    struct ArrowIpcInputStream input = {read_bytes, release, &from};
    struct ArrowArrayStream batches = {0};
    struct ArrowSchema schema = {0};
    struct ArrowArray batch = {0};
    int failed = dis_open(&from.stream, arguments[1], arguments[2], strlen(arguments[2]), 60);
    failed = failed || ArrowIpcArrayStreamReaderInit(&batches, &input, NULL) || batches.get_schema(&batches, &schema);
    while (!failed && !(failed = batches.get_next(&batches, &batch)) && batch.release) {
        for (int64_t i = 0; i < batch.n_children; i++)
            printf("%s: %lld rows, %lld nulls\n", schema.children[i]->name, (long long)batch.length,
                   (long long)batch.children[i]->null_count);
        batch.release(&batch);
    }
    if (failed) fprintf(stderr, "%s\n", batches.release ? batches.get_last_error(&batches) : dis_error(from.stream));
    if (schema.release) schema.release(&schema);
    if (batches.release) batches.release(&batches);
    free(from.bytes);
    dis_close(from.stream);
    return failed != 0;
}
