"""Build the image twice, compare both builds, and try the image in containers. Needs podman, version 4.3 or later.

python tests/image.py [BASE]

The containers are confined like those of `deploy/compose.yaml`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "localhost/dissociated"
CONFINED = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
#: Seconds that the node has to become healthy.
PATIENCE = 60

HEALTH = "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/healthz', timeout=5)"

#: The program of another container, which shares the network of the node.
SMOKE = """\
import os
import pyarrow as pa
import dissociated as dis

table = pa.table({"n": range(1000), "s": [str(n) for n in range(1000)]})
with dis.connect("grpc://127.0.0.1:8815") as client:
    client.put("smoke", table)
    for transport in ("shm", "tcp", "grpc"):
        assert client.read("smoke", transport=transport).read_all().equals(table), transport
status = dict(line.rstrip().split(":\\t", 1) for line in open("/proc/self/status"))
assert status["CapEff"] == status["CapBnd"] == "0" * 16 and status["NoNewPrivs"] == "1", status
assert (os.getuid(), os.getgid()) == (1000, 1000)
try:
    open("/opt/dissociated/file", "w")
except OSError as error:
    print("ok", dis.__version__, error)
else:
    raise SystemExit("the root file system can be written")
"""


def podman(*arguments: str) -> str:
    """Run podman, show its errors, and return its output."""
    done = subprocess.run(["podman", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


def build(base: str, tag: str) -> str:
    """Build the image with the times of the last commit, and return its id, the hash of its layers and settings."""
    epoch = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    times = ["--timestamp", epoch, "--build-arg", f"SOURCE_DATE_EPOCH={epoch}"]
    files = ["--file", "deploy/Dockerfile", "--build-arg", f"BASE={base}"]
    podman("build", "--quiet", "--no-cache", *times, *files, "--tag", f"{NAME}:{tag}", ".")
    return podman("image", "inspect", "--format", "{{.Id}}", f"{NAME}:{tag}")


def wait_until_healthy(node: str) -> None:
    """Ask the node for its health until it answers."""
    ask = ["podman", "exec", node, "python", "-c", HEALTH]
    deadline = time.monotonic() + PATIENCE
    while subprocess.run(ask, capture_output=True, check=False).returncode:
        if time.monotonic() > deadline:
            raise SystemExit(f"the node is not healthy:\n{podman('logs', node)}")
        time.sleep(0.2)


def try_image(image: str) -> None:
    """Run the default command of the image, and use the node from another container."""
    with ExitStack() as stack:
        memory = ["--opt", "type=tmpfs", "--opt", "device=tmpfs", "--opt", "o=uid=1000,mode=0700"]
        volume = podman("volume", "create", *memory)
        stack.callback(podman, "volume", "rm", "--force", volume)
        confined = [*CONFINED, "--volume", f"{volume}:/arrow"]
        # Clients reach the node by the name of its host, so that name must have an address in the containers.
        node = podman("run", "--detach", "--network", "none", "--hostname", "localhost", *confined, image)
        stack.callback(podman, "rm", "--force", node)
        wait_until_healthy(node)
        network = ["--network", f"container:{node}"]
        print(podman("run", "--rm", *network, *confined, "--entrypoint", "python", image, "-c", SMOKE), flush=True)
        podman("stop", "--time", "40", node)
        assert podman("inspect", "--format", "{{.State.ExitCode}}", node) == "0", podman("logs", node)


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else "docker.io/library/python:3.12-slim"
    first, second = (build(base, tag) for tag in ("first", "second"))
    assert first == second, f"two builds differ: {first} and {second}"
    print(f"twice the same image: {first}", flush=True)
    try_image(f"{NAME}:first")


if __name__ == "__main__":
    main()
