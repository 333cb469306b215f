"""Hosts in network namespaces of one machine, and a link between them that delays packets and can be cut.

Each host has its own addresses, ports, loopback interface, name, boot id and /dev/shm. The link is a process
(`link.py`), since the kernel may have no netem. Programs on a host are forks, so a test needs the fixture `forks`. All
of this needs root.

    with Cluster("a", "b", delay=0.01) as cluster:     # 10 ms each way: a round trip takes 20 ms
        node = cluster["a"].dissociated("node", "--store", "/dev/shm/store")
        cluster.cut("a")                               # nobody reaches a any more; `mend` undoes it
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from support.helpers import PATIENCE
from support.processes import Fork, Process

_NETWORK = "10.87.0"
_TOOLS = ("ip", "unshare", "mount", "hostname")
_NAMESPACES = ("--net", "--mount", "--uts")
_SETUP = (
    "mount --make-rprivate / && mount -t tmpfs -o mode=1777 tmpfs /dev/shm &&"
    ' mount --bind "$0" /proc/sys/kernel/random/boot_id && mount --bind "$1" /etc/hosts && hostname "$2" &&'
    " ip link set lo up && echo ready && exec sleep infinity"
)


def missing() -> str | None:
    """Return the reason why this machine cannot have such hosts, or None."""
    if os.geteuid() != 0:
        return "only root can make network namespaces with a link between them"
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"there is no {', '.join(absent)}"
    if not os.path.exists("/dev/net/tun"):
        return "the kernel has no /dev/net/tun"
    tried = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Host:
    """One host of a cluster, which `Cluster` makes and ends."""

    def __init__(self, name: str, address: str, files: Path) -> None:
        self.name, self.address = name, address
        boot = files / f"{name}.boot_id"
        boot.write_text(f"{uuid.uuid4()}\n")
        command = ["unshare", *_NAMESPACES, "sh", "-c", _SETUP, str(boot), str(files / "hosts"), name]
        self._keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.pid = self._keeper.pid
        self._started: list[Fork | Process] = []
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "ready\n":
            self.close()
            raise RuntimeError(f"the host {name} could not be made")

    @property
    def prefix(self) -> list[str]:
        """The beginning of a command that runs on this host, for programs that are not forks of the tests' process."""
        return ["nsenter", f"--target={self.pid}", *_NAMESPACES]

    def run(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run Python on this host, and return its result."""
        with Fork(*arguments, host=self.pid, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            output, errors = process.communicate(timeout=3 * PATIENCE)
        done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
        if check:
            assert not done.returncode, done.stderr
        return done

    def start(self, *arguments: str | Path) -> Fork:
        """Start Python on this host, with pipes. It is killed with the host."""
        self._started.append(process := Fork(*arguments, host=self.pid, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return process

    def dissociated(self, *arguments: str | Path) -> Process:
        """Start a `dissociated` command that serves, and return it once it prints its address."""
        self._started.append(process := Process(*arguments, forked=True, host=self.pid))
        return process

    def close(self) -> None:
        """Kill all processes of this host, and the host."""
        for process in self._started:
            process.kill()
            if isinstance(process, Fork):
                process.communicate()
        self._keeper.kill()
        self._keeper.communicate()


def answer(process: subprocess.Popen[str], asked: str = "") -> str:
    """Write `asked` to a process that has pipes, and return the next line that it prints."""
    assert process.stdin is not None
    assert process.stdout is not None
    if asked:
        process.stdin.write(asked)
        process.stdin.flush()
    return process.stdout.readline()


class Cluster:
    """Hosts with these names, each of which reaches the others by name. Use it as a context manager."""

    def __init__(self, *names: str, delay: float = 0.0) -> None:
        self.addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, 1)}
        self._delay = delay

    def __enter__(self) -> Cluster:
        with ExitStack() as stack:
            files = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            lines = [f"{address} {name}" for name, address in self.addresses.items()]
            (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            self._hosts = {}
            for name, address in self.addresses.items():
                self._hosts[name] = host = Host(name, address, files)
                stack.callback(host.close)
            places = [f"{host.pid}={host.address}" for host in self._hosts.values()]
            command = [sys.executable, str(Path(__file__).with_name("link.py")), str(self._delay), *places]
            self._link = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1)
            stack.callback(self._link.communicate)  # it ends with its input
            assert answer(self._link) == "ready\n"
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def cut(self, name: str) -> None:
        """Lose all packets to and from a host, as if its cable was pulled."""
        self._tell(f"cut {self.addresses[name]}")

    def allow(self, name: str, *ports: int) -> None:
        """Drop connections from other hosts to any other TCP port of a host, like a firewall."""
        self._tell(f"allow {self.addresses[name]} {' '.join(map(str, ports))}")

    def mend(self, name: str) -> None:
        """Undo `cut` and `allow`."""
        self._tell(f"mend {self.addresses[name]}")

    def limit(self, name: str, rate: float) -> None:
        """Let a host send that many bytes a second from now on."""
        self._tell(f"rate {self.addresses[name]} {rate}")

    def sent(self, name: str) -> int:
        """Return the number of bytes that a host has sent over the link."""
        return self._tell(f"sent {self.addresses[name]}")

    def packets(self) -> int:
        """Return the number of packets that the link has forwarded."""
        return self._tell("mend 0.0.0.0")

    def _tell(self, line: str) -> int:
        return int(answer(self._link, f"{line}\n"))
