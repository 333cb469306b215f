"""Containers of Kubernetes manifests, run without Kubernetes: namespaces of Linux, with the users and mounts they name.

A container gets a root file system of its own, which is read-only if the manifest says so. Programs of this machine and
this environment's Python are in it. It gets the process, mount and IPC namespaces of a pod, and the user, group,
capabilities and variables of its manifest. All pods share one network, in which the ports are free and the names of
the services lead to the loopback interface. All of this needs root.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from support.helpers import PATIENCE

Manifest = Mapping[str, Any]

_TOOLS = ("unshare", "nsenter", "mount", "chroot", "setpriv", "ip")
_NAMESPACES = ("--mount", "--pid", "--ipc", "--uts")
_SOURCE = Path(__file__).resolve().parents[2] / "src"
#: Names of services and nodes, and the pods' addresses, in the one network of all pods.
_HOSTS = "127.0.0.1 localhost catalog.dissociated.svc 127-0-0-1.nodes.dissociated.svc\n"
_FIELDS = {"spec.nodeName": "worker-1", "status.podIP": "127.0.0.1"}
_PROBE = """
import ssl, sys, urllib.request
context = ssl._create_unverified_context()  # The kubelet does not verify certificates.
for url in sys.argv[1:]:
    print(urllib.request.urlopen(url, timeout=30, context=context).read().decode(), end="")
"""


def missing() -> str | None:
    """Return the reason why this machine cannot run pods, or None."""
    if os.geteuid() != 0:
        return "only root can run a container without a container engine"
    if absent := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"there is no {', '.join(absent)}"
    tried = subprocess.run(["unshare", "--net", *_NAMESPACES, "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Network:
    """The network namespace of all pods. Use it as a context manager."""

    def __enter__(self) -> Network:
        command = "ip link set lo up && echo ready && exec cat"  # which ends with its input
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stdout.readline() == "ready\n"
        self.prefix = ["nsenter", f"--net=/proc/{self._keeper.pid}/ns/net"]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keeper.communicate(timeout=PATIENCE)

    def get(self, *urls: str) -> str:
        """Return the answers of probes of the kubelet, one after the other."""
        command = [*self.prefix, sys.executable, "-c", _PROBE, *urls]
        return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, check=True).stdout


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """Replace `$(NAME)` as Kubernetes does: unknown names stay, and `$$` is one `$`."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda match: "$" if match[0] == "$$" else environment.get(match[1], match[0]),
        text,
    )


def environment(container: Manifest, secrets: Mapping[str, Path]) -> dict[str, str]:
    """Return the environment that a manifest gives to a container."""
    values = {}
    for variable in container.get("env", ()):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            values[variable["name"]] = _FIELDS[source["fieldRef"]["fieldPath"]]
        elif "secretKeyRef" in source:
            reference = source["secretKeyRef"]
            values[variable["name"]] = (secrets[reference["name"]] / reference["key"]).read_text()
        else:
            values[variable["name"]] = expanded(variable["value"], values)
    return values


class Container:
    """The command that starts a container of a pod.

    Args:
        pod: The pod's `spec`.
        container: A container of that pod.
        volumes: The directory of each volume of the pod.
        secrets: The directory of each Secret, for variables.
        network: The network of all pods.
        directory: An empty directory, where the root file system is mounted.
    """

    def __init__(
        self,
        pod: Manifest,
        container: Manifest,
        volumes: Mapping[str, Path],
        secrets: Mapping[str, Path],
        network: Network,
        directory: Path,
    ) -> None:
        variables = environment(container, secrets)
        arguments = [expanded(one, variables) for one in container.get("args", ())]
        self._command = [*container.get("command", ["dissociated"]), *arguments]
        #: The image's own variables, and those of the manifest.
        path = f"{sysconfig.get_path('scripts')}:/usr/bin:/bin"
        variables = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/", **variables}
        user = pod["securityContext"]
        root = shlex.quote(str(directory))
        lines = ["set -e", "mount --make-rprivate /", f"mount -t tmpfs -o mode=755 tmpfs {root}", f"cd {root}"]
        lines += ["mkdir -m 755 dev etc proc", "mkdir -m 1777 tmp", "mount -t proc proc proc"]
        for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"):
            if os.path.islink(f"/{name}"):
                lines.append(f"ln -s {os.readlink(f'/{name}')} {name}")
            elif os.path.isdir(f"/{name}"):
                lines += _bind(f"/{name}", name, read_only=True)
        for name in ("null", "zero", "random", "urandom"):
            lines += [f"touch dev/{name}", f"mount --bind /dev/{name} dev/{name}"]
        for name in ("ld.so.cache", "nsswitch.conf"):
            lines.append(f"cp /etc/{name} etc/{name} || true")
        lines += [f"printf '{_HOSTS}' > etc/hosts", "mkdir -m 1777 dev/shm", "mount -t tmpfs -o size=64m shm dev/shm"]
        for needed in dict.fromkeys([sys.base_prefix, sys.prefix, str(_SOURCE)]):
            if not needed.startswith("/usr"):
                lines += _bind(needed, needed.lstrip("/"), read_only=True)
        for mount in container.get("volumeMounts", ()):
            lines += _bind(str(volumes[mount["name"]]), mount["mountPath"].lstrip("/"), mount.get("readOnly", False))
        if container["securityContext"].get("readOnlyRootFilesystem"):
            lines.append("mount -o remount,ro .")
        groups = user.get("fsGroup", user["runAsGroup"])
        become = f"setpriv --reuid={user['runAsUser']} --regid={user['runAsGroup']} --groups={groups}"
        if not container["securityContext"]["allowPrivilegeEscalation"]:
            become += " --no-new-privs"
        if container["securityContext"]["capabilities"] == {"drop": ["ALL"]}:
            become += " --bounding-set=-all --inh-caps=-all"
        given = shlex.join(f"{name}={value}" for name, value in variables.items())
        lines.append(f'exec chroot . {become} env -i -C / {given} "$@"')
        self._prefix = [*network.prefix, "unshare", *_NAMESPACES, "--fork", "--kill-child", "sh", "-c"]
        self._prefix += ["\n".join(lines), "sh"]

    def run(self, *command: str, given: bytes = b"", check: bool = True) -> subprocess.CompletedProcess[bytes]:
        """Run the container to its end, or another command in its place."""
        return subprocess.run(
            [*self._prefix, *(command or self._command)],
            input=given,
            capture_output=True,
            timeout=2 * PATIENCE,
            check=check,
        )

    def start(self, log: Path) -> Running:
        """Start the container, whose errors go into `log`."""
        return Running([*self._prefix, *self._command], log)


class Running:
    """A container that serves. Use it as a context manager, which kills it."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("w") as errors:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self._log = log

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # `unshare --kill-child` does not help: the kernel forgets that request when the container changes its user.
        with suppress(FileNotFoundError, ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._process.communicate(timeout=PATIENCE)

    def wait_until_it_serves(self) -> None:
        """Return once the command has printed the address of its catalog."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("catalog"):
                return
        raise AssertionError(f"it ended: {self._log.read_text()}")

    def terminate(self) -> int:
        """Send SIGTERM to the container's first process, and return its exit status."""
        self._signal(signal.SIGTERM)
        self._process.communicate(timeout=2 * PATIENCE)
        return self._process.returncode

    def _signal(self, number: int) -> None:
        """Signal the first process of the container. The others end with it."""
        for first in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split():
            os.kill(int(first), number)


def _bind(source: str, target: str, read_only: bool) -> list[str]:
    """Return the commands that mount a directory below the current one."""
    there = shlex.quote(target)
    lines = [f"mkdir -p {there}", f"mount --bind {shlex.quote(source)} {there}"]
    return [*lines, f"mount -o remount,bind,ro {there}"] if read_only else lines
