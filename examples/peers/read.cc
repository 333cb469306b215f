// Read a stream over tcp:, and write it as an Arrow IPC stream. C++ alone.
//
//     c++ -std=c++17 -o read read.cc && ./read "tcp://127.0.0.1:4711?want_data=..." TICKET > stream.arrows
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <iostream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>

static uint64_t u64(const std::string &data, size_t at) {
    std::string part = data.substr(at, 8);
    part.resize(8); // the end of stream has four bytes only
    uint64_t value;
    return std::memcpy(&value, part.data(), 8), value;
}

static std::string bytes(uint64_t value, size_t size) { return {reinterpret_cast<char *>(&value), size}; }
static std::string padding(size_t length) { return std::string(-length & 7, '\0'); }

struct Stream {
    int socket;
    std::map<uint32_t, std::string> headers, bodies;
    std::optional<uint32_t> count;

    std::string read(size_t size) {
        std::string data(size, '\0');
        for (size_t at = 0, got; at < size; at += got)
            if (ssize_t(got = size_t(recv(socket, &data[at], size - at, 0))) <= 0) throw std::runtime_error("stream-whole");
        return data;
    }

    void take(uint64_t kind, uint64_t tag, const std::string &payload) {
        if (kind == 1 && payload.at(0) == 1) headers[uint32_t(u64(payload, 1))] = payload.substr(5);
        else if (kind == 1) count = uint32_t(u64(payload, 1));
        else if (kind == 2 && tag >> 56 == 0) bodies[uint32_t(tag)] = payload;
        else if (kind == 5) {
            uint64_t n = u64(payload, 0), u = u64(payload, 8), t = u64(payload, 16);
            uint64_t untagged = 24 + 8 * n, tagged = untagged + ((n * u + 7) & ~7ull);
            for (uint64_t i = 0; i < n; i++)
                take(1, 0, payload.substr(untagged + i * u, u)),
                    take(2, u64(payload, 24 + 8 * i), payload.substr(tagged + i * t, t));
        } else throw std::runtime_error(kind == 4 ? payload.substr(0, payload.find('\0')) : "a frame of another kind");
    }
};

int main(int, char **arguments) try {
    std::string uri = arguments[1], ticket = arguments[2], preamble("DISSOC\0\1", 8);
    size_t colon = uri.find(':', 6), query = uri.find('?');
    uint64_t want = std::stoull(uri.substr(uri.find("want_data=") + 10));
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(uri.substr(6, colon - 6).c_str(), uri.substr(colon + 1, query - colon - 1).c_str(), &hints, &found))
        throw std::runtime_error("the host is unknown");
    Stream stream{socket(found->ai_family, SOCK_STREAM, 0), {}, {}, {}};
    if (connect(stream.socket, found->ai_addr, found->ai_addrlen)) throw std::runtime_error("cannot connect");
    freeaddrinfo(found);
    std::string request = preamble + bytes(ticket.size() | 2ull << 56, 8) + bytes(want, 8) + ticket + padding(ticket.size());
    if (send(stream.socket, request.data(), request.size(), 0) != ssize_t(request.size()) || stream.read(8) != preamble)
        throw std::runtime_error("preamble");
    for (uint32_t next = 0; stream.count != next;) {
        if (!stream.headers.count(next) || (next && !stream.bodies.count(next))) {
            std::string head = stream.read(16);
            uint64_t length = u64(head, 0) << 8 >> 8;
            stream.take(u64(head, 0) >> 56, u64(head, 8), stream.read((length + 7) & ~7ull).substr(0, length));
            continue;
        }
        std::string header = stream.headers[next] + padding(stream.headers[next].size());
        std::cout << bytes(0xffffffff, 4) << bytes(header.size(), 4) << header << stream.bodies[next];
        stream.headers.erase(next), stream.bodies.erase(next), next++;
    }
    std::cout << bytes(0xffffffff, 8);
    return close(stream.socket);
} catch (const std::exception &error) {
    return std::cerr << error.what() << "\n", 1;
}
