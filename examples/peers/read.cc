// Read a stream over tcp:, and write it as an Arrow IPC stream. C++ alone.
//
//     c++ -std=c++17 -o read read.cc && ./read "tcp://127.0.0.1:4711?want_data=..." TICKET > stream.arrows
#include <netdb.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <stdexcept>

uint32_t next = 0;           // the message to write next. Numbers are modulo 2^32
uint64_t count = UINT64_MAX; // the messages of the stream, known at its end
std::map<uint32_t, std::string> headers, bodies{{next, ""}}; // the schema comes first, and has no body

std::string bytes(uint64_t value) { return {reinterpret_cast<char *>(&value), 8}; }
std::string padded(std::string data) { return data.append(-data.size() & 7, '\0'); }
// Return the integer at this place, which may be shorter: the count of an end of stream has four bytes.
uint64_t u64(const std::string &data, size_t at) { return std::memcpy(&at, (data.substr(at, 8) + bytes(0)).data(), 8), at; }

// Return the bodyLength of a Message, the fourth field of its flatbuffer, which is left out if it is 0.
uint64_t body_length(const std::string &header) {
    uint32_t table = u64(header, 0), fields = table - u64(header, table);
    uint16_t at = uint16_t(u64(header, fields)) > 10 ? u64(header, fields + 10) : 0;
    return at ? u64(header, table + at) : 0;
}

std::string read(FILE *server, size_t size) {
    std::string data(size, '\0');
    return fread(&data[0], 1, size, server) == size ? data : throw std::runtime_error("stream-whole");
}

// Store a message by the kind of its frame: 1 UNTAGGED, 2 TAGGED, 4 ABORT, 5 RUN.
void take(uint64_t kind, uint64_t tag, const std::string &data) {
    if (kind == 1 && data.at(0) == 1) headers[uint32_t(u64(data, 1))] = data.substr(5);
    else if (kind == 1 && data.size() == 5 && data[0] == 0) count = uint32_t(u64(data, 1));
    else if (kind == 2 && tag >> 32 == 0) bodies[uint32_t(tag)] = data;
    else if (kind != 5) throw std::runtime_error(kind == 4 ? data.c_str() : "a message of another kind");
    else for (uint64_t n = u64(data, 0), u = u64(data, 8), t = u64(data, 16), at = 24 + 8 * n, i = 0; i < n; i++)
        take(1, 0, data.substr(at + i * u, u)), take(2, u64(data, 24 + 8 * i), data.substr(at + ((n * u + 7) & ~7ull) + i * t, t));
}

int main(int, char **arguments) try {
    std::string uri = arguments[1], ticket = arguments[2], preamble("DISSOC\0\1", 8);
    char host[256], port[6];
    if (sscanf(uri.data(), "tcp://[%255[^]]]:%5[0-9]", host, port) != 2 && sscanf(uri.data(), "tcp://%255[^:]:%5[0-9]", host, port) != 2)
        throw std::runtime_error("no location of tcp");
    addrinfo *found = nullptr;
    if (getaddrinfo(host, port, nullptr, &found)) throw std::runtime_error("the host is unknown");
    FILE *server = fdopen(socket(found->ai_family, SOCK_STREAM, 0), "r+");
    if (connect(fileno(server), found->ai_addr, found->ai_addrlen)) throw std::runtime_error("cannot connect");
    freeaddrinfo(found);
    uint64_t want_data = std::stoull(uri.substr(uri.find("want_data=") + 10));
    std::string request = preamble + bytes(ticket.size() | 2ull << 56) + bytes(want_data) + padded(ticket);
    if (send(fileno(server), request.data(), request.size(), 0) < 0 || read(server, 8) != preamble) throw std::runtime_error("preamble");
    while (next != count)
        if (headers.count(next) && bodies.count(next)) {
            if (bodies[next].size() != body_length(headers[next])) throw std::runtime_error("body-length");
            std::cout << bytes(0xffffffff | padded(headers[next]).size() << 32) << padded(headers[next]) << bodies[next];
            headers.erase(next), bodies.erase(next), next++;
        } else {
            uint64_t word = u64(read(server, 8), 0), tag = u64(read(server, 8), 0), length = word << 8 >> 8;
            take(word >> 56, tag, read(server, (length + 7) & ~7ull).substr(0, length));
        }
    return std::cout << bytes(0xffffffff), fclose(server);
} catch (const std::exception &error) {
    return std::cerr << error.what() << "\n", 1;
}
