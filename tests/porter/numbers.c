/* Print the message that each sequence number on the wire means to the C library, or "null" if it was delivered already.
 *
 *     numbers NEXT NUMBER [NEXT NUMBER]...
 */
#include "dissociated.c"

int main(int count, char **arguments) {
    for (int i = 1; i + 1 < count; i += 2) {
        dis_stream *stream = calloc(1, sizeof(dis_stream));
        if (!stream) return 1;
        stream->next = strtoull(arguments[i], NULL, 10);
        slot *found = slot_of(stream, (uint32_t)strtoul(arguments[i + 1], NULL, 10));
        if (found)
            printf("%llu\n", (unsigned long long)(stream->next + (uint64_t)(found - stream->slots)));
        else
            printf("null\n");
        free(stream->slots);
        free(stream);
    }
    return 0;
}
