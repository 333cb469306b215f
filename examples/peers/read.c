/* Read a stream with the library, and write it as an Arrow IPC stream, which any Arrow library reads: for example
 * ArrowIpcInputStreamInitFile of nanoarrow, or pyarrow.ipc.open_stream.
 *
 *     cc -o read read.c dissociated.c
 *     ./read "shm:///run/user/1000/dissociated/7-0c.sock?want_data=..." TICKET > stream.arrows */
#include "dissociated.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int count, char **arguments) {
    if (count != 3) return fprintf(stderr, "usage: read URI TICKET > FILE\n"), 2;
    dis_stream *stream;
    dis_message message = {0};
    const uint32_t end[2] = {0xffffffff, 0};
    if (!dis_open(&stream, arguments[1], arguments[2], strlen(arguments[2]), 60))
        while (dis_next(stream, &message) == 1) {
            size_t size;
            uint8_t *bytes = dis_encapsulate(&message, &size);
            if (!bytes) abort();
            fwrite(bytes, 1, size, stdout);
            free(bytes);
            dis_release(stream, &message);
        }
    if (dis_error(stream)) {
        fprintf(stderr, "%s\n", dis_error(stream));
        if (dis_error_code(stream)) fprintf(stderr, "code %d\n", dis_error_code(stream));
    } else {
        fwrite(end, 4, 2, stdout);
    }
    int failed = dis_error(stream) != NULL;
    dis_release(stream, &message);
    dis_close(stream);
    return failed;
}
