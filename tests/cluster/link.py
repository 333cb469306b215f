"""The link between the hosts of a cluster: a process that forwards their packets after a delay.

Each host gets a TUN device, `eth0`, whose other end this process reads and writes. It is started with the delay in
seconds and, for each host, its process and its address: `link.py 0.01 123=10.87.0.1 ...`. It prints a line once all
devices exist. It then takes a line for each change, and answers each with the number of packets that it has forwarded:
`cut 10.87.0.1` loses all packets of a host, `allow 10.87.0.1 8815 8816` drops connections from others to its other TCP
ports, like a firewall, and `mend 10.87.0.1` undoes both. `delay 0.1` changes the delay. `rate 10.87.0.1 1000000` lets a
host send that many bytes a second. `sent 10.87.0.1` is answered with the number of bytes that a host has sent.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import sys
import time

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 16_000
_QUEUE = 10_000  # packets that the device holds, as a window of 160 MB may be under way


def open_device(pid: int, address: str) -> int:
    """Return the descriptor of a TUN device with this address on the host of a process."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(namespace: int) -> None:
        if libc.setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")

    with open(f"/proc/{pid}/ns/net") as theirs, open("/proc/self/ns/net") as own:
        enter(theirs.fileno())  # a device belongs to the namespace in which its file is opened
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
        for command in (
            f"ip address add {address}/24 dev eth0",
            f"ip link set eth0 mtu {_MTU} txqueuelen {_QUEUE} up",
        ):
            subprocess.run(command.split(), check=True)
        enter(own.fileno())
    return descriptor


def _opens(packet: bytes) -> bool:
    """Return whether an IPv4 packet asks for a TCP connection: it has the flag SYN and lacks ACK."""
    return packet[9] == socket.IPPROTO_TCP and packet[(packet[0] & 15) * 4 + 13] & 0x12 == 0x02


def _port(packet: bytes) -> int:
    """Return the port that a TCP packet goes to."""
    at = (packet[0] & 15) * 4 + 2
    return int.from_bytes(packet[at : at + 2], "big")


def forward(delay: float, devices: dict[bytes, int]) -> None:
    """Forward packets between `devices`, which are given by address, until the standard input ends."""
    waiting: list[tuple[float, int, int, bytes]] = []  # when to deliver a packet, its number, and the device
    absent: set[bytes] = set()
    allowed: dict[bytes, set[int]] = {}  # by host, the TCP ports to which others may connect
    rates: dict[bytes, float] = {}  # by host, the bytes a second that it may send
    free_at: dict[bytes, float] = {}  # by host with a rate, when its line has sent everything
    sent = dict.fromkeys(devices, 0)  # by host, the bytes that were forwarded
    number = 0
    poll = select.poll()
    for descriptor in (*devices.values(), 0):
        poll.register(descriptor, select.POLLIN)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, descriptor, packet = heapq.heappop(waiting)
            try:
                os.write(descriptor, packet)
            except BlockingIOError:
                pass  # a full queue loses packets
        for descriptor, _ in poll.poll(None if not waiting else max(0.0, waiting[0][0] - now) * 1000):
            if descriptor == 0:
                line = sys.stdin.readline().split()
                if not line:
                    return
                if line[0] == "delay":
                    delay = float(line[1])
                    print(number, flush=True)
                    continue
                address = bytes(map(int, line[1].split(".")))
                if line[0] == "rate":
                    rates[address] = float(line[2])
                elif line[0] == "sent":
                    print(sent[address], flush=True)
                    continue
                else:
                    absent.discard(address)
                    allowed.pop(address, None)
                    if line[0] == "cut":
                        absent.add(address)
                    elif line[0] == "allow":
                        allowed[address] = {int(port) for port in line[2:]}
                print(number, flush=True)
                continue
            packet = os.read(descriptor, 1 << 16)
            source, target = packet[12:16], packet[16:20]
            if packet[0] >> 4 != 4 or target not in devices or absent & {source, target}:
                continue
            if target not in allowed or not _opens(packet) or _port(packet) in allowed[target]:
                number += 1
                sent[source] += len(packet)
                departs = time.monotonic()
                if source in rates:
                    departs = free_at[source] = max(departs, free_at.get(source, 0.0)) + len(packet) / rates[source]
                heapq.heappush(waiting, (departs + delay, number, devices[target], packet))


if __name__ == "__main__":
    made = {}
    for told in sys.argv[2:]:
        process, _, place = told.partition("=")
        made[bytes(map(int, place.split(".")))] = open_device(int(process), place)
    print("ready", flush=True)
    forward(float(sys.argv[1]), made)
