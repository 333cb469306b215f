"""The manifests of `deploy/kubernetes`: validated, and their containers run in namespaces, without Kubernetes."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import kubernetes_validate
import pyarrow as pa
import pytest
import yaml

from support.certificates import certificates
from support.machine import need
from support.pods import Container, Manifest, Network

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = ROOT / "deploy" / "kubernetes"
RUNNING = (ROOT / "docs" / "running.md").read_text()
#: Kinds of projects other than Kubernetes, of which `kubernetes_validate` has no schemas.
FOREIGN = ("Kustomization", "PodMonitor")
TABLE = pa.table({"n": [1, 2, 3]})
USER = 1000


def manifests(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def manifest(kind: str) -> dict[str, Any]:
    """Return the one manifest of a kind."""
    [found] = [
        one
        for path in sorted(KUBERNETES.glob("*.yaml"))
        if path.stem != "spark-executor"
        for one in manifests(path)
        if one["kind"] == kind
    ]
    return found


def pod(kind: str) -> Manifest:
    """Return the `spec` of the pods of a manifest."""
    spec: Manifest = manifest(kind)["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


def containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_manifest_follows_the_schema(path: Path) -> None:
    """Validate against the strict schemas of Kubernetes, which refuse unknown fields, of 1.30 and of the latest."""
    for one in manifests(path):
        if one["kind"] not in FOREIGN:
            for version in ("1.30", kubernetes_validate.latest_version()):
                kubernetes_validate.validate(one, version, strict=True)


def lost(given: Any, printed: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each value in `given` that is not in `printed`."""
    match given, printed:
        case {**given}, {**printed}:
            for name, value in given.items():
                yield from lost(value, printed.get(name), f"{path}.{name}")
        case [*given], [*printed] if len(given) == len(printed):
            for index, pair in enumerate(zip(given, printed, strict=True)):
                yield from lost(*pair, f"{path}[{index}]")
        case _:
            if given != printed:
                yield path


@pytest.fixture
def kubectl() -> str:
    return shutil.which("kubectl") or pytest.skip("there is no kubectl on this machine")


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*.yaml")), ids=lambda path: path.stem)
def test_kubectl_knows_every_field_of_pods_and_services(path: Path, kubectl: str) -> None:
    """A local dry run of `kubectl set` reads the manifest into kubectl's types, which drop unknown fields."""
    for one in manifests(path):
        if one["kind"] in ("StatefulSet", "DaemonSet", "Job", "Pod", "Service"):
            one["spec"]["unknown"] = True
            change = ["selector", "app=other"] if one["kind"] == "Service" else ["image", "*=other"]
            printed = subprocess.run(
                [kubectl, "set", *change, "--local", "--dry-run=client", "--filename=-", "--output=json"],
                input=json.dumps(one),
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            missing = lost(one, json.loads(printed.stdout))
            changed = (".image", ".selector.app")
            assert [path for path in missing if not path.endswith(changed)] == [".spec.unknown"]


def test_the_kustomization_can_be_built(kubectl: str) -> None:
    built = subprocess.run([kubectl, "kustomize", KUBERNETES], capture_output=True, text=True, timeout=60, check=True)
    kinds = set()
    for one in yaml.safe_load_all(built.stdout):
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
        kinds.add(one["kind"])
        assert one["metadata"].get("namespace", one["metadata"]["name"]) == "dissociated"
    assert kinds == {"Namespace", "Service", "StatefulSet", "DaemonSet", "NetworkPolicy"}
    assert "image: dissociated\n" not in built.stdout, "every image has a tag"


def test_ports_are_those_of_the_page() -> None:
    """The table of ports in docs/running.md, the containers, the services and the network policies agree."""
    rows = [[cell.strip() for cell in row.split("|")] for row in RUNNING.splitlines() if row.startswith("| ")]
    page: dict[str, set[int]] = {"catalog": set(), "node": set()}
    for row in rows:
        numbers = {int(number) for number in re.findall(r"\b8\d{3}\b", row[3])} if len(row) == 6 else set()
        if "Prometheus" in row[1] and numbers:
            assert numbers == {8080, 8081}
            page["node"].add(8080)
            page["catalog"].add(8081)
        elif row[2] == "the catalog":
            page["catalog"] |= numbers
        elif row[2] == "each node":
            page["node"] |= numbers
    assert page == {"catalog": {8815, 8081}, "node": {8816, 8817, 8080}}
    for name, kind in (("catalog", "StatefulSet"), ("node", "DaemonSet")):
        [container] = pod(kind)["containers"]
        assert {port["containerPort"] for port in container["ports"]} == page[name]
        assert set(map(int, re.findall(r":(8\d{3})\b", " ".join(container["args"])))) - page[name] <= {8815}
        [policy] = [one for one in manifests(KUBERNETES / "network-policy.yaml") if one["metadata"]["name"] == name]
        assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == page[name]


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet", "Job", "Pod"])
def test_containers_are_confined(kind: str) -> None:
    spec = pod(kind)
    user = spec["securityContext"]
    assert (user["runAsUser"], user["runAsGroup"], user["runAsNonRoot"]) == (USER, USER, True)
    assert f"--uid {USER} " in (ROOT / "deploy" / "Dockerfile").read_text()
    for container in containers(spec):
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"]
        assert not confined["allowPrivilegeEscalation"]
        assert confined["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


def test_memory_limits_have_room_for_the_store() -> None:
    units = {"Mi": 1 << 20, "Gi": 1 << 30}
    for spec in (pod("DaemonSet"), pod("Pod")):
        node = containers(spec)[0]
        store = int(re.search(r"--limit[ =](\d+)GiB", " ".join(node["args"]))[1]) << 30  # type: ignore[index]
        number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", node["resources"]["limits"]["memory"]).groups()  # type: ignore[union-attr]
        assert int(number) * units[unit] >= store + (150 << 20)


class Cluster:
    """The Secrets and the volumes of one host, and the network of its pods."""

    def __init__(self, directory: Path, memory: Path, network: Network) -> None:
        self.network, self._directory, self._memory = network, directory, memory
        made = certificates(directory, "catalog.dissociated.svc", "*.nodes.dissociated.svc")
        self.token, reader = secrets.token_hex(32), secrets.token_hex(32)
        roots = Path(made.roots).read_bytes()
        content = {
            "dissociated": {
                "tls.crt": Path(made.cert).read_bytes(),
                "tls.key": Path(made.key).read_bytes(),
                "ca.crt": roots,
                "tokens": f"writer {self.token} write\nreader {reader} read\n".encode(),
                "secret": secrets.token_hex(32).encode(),
            },
            "dissociated-client": {"ca.crt": roots, "token": reader.encode()},
        }
        self.secrets = {name: self._secret(name, files) for name, files in content.items()}

    def _secret(self, name: str, files: Mapping[str, bytes]) -> Path:
        """Write a Secret as the kubelet mounts it: links to files of root, which the group of the pod may read."""
        directory = self._directory / name
        (directory / "..1").mkdir(parents=True)
        (directory / "..data").symlink_to("..1")
        for key, value in files.items():
            file = directory / "..1" / key
            file.write_bytes(value)
            os.chown(file, 0, USER)
            file.chmod(0o440)
            (directory / key).symlink_to(f"..data/{key}")
        return directory

    def _volume(self, spec: Manifest, volume: Manifest) -> Path:
        if "secret" in volume:
            return self.secrets[volume["secret"]["secretName"]]
        if "hostPath" in volume:
            assert volume["hostPath"]["path"] == "/dev/shm"
            return self._memory
        in_memory = volume.get("emptyDir", {}).get("medium") == "Memory"
        directory = Path(tempfile.mkdtemp(dir=self._memory if in_memory else self._directory))
        os.chown(directory, 0, spec["securityContext"]["fsGroup"])
        directory.chmod(0o2777 if "emptyDir" in volume else 0o2775)
        return directory

    def containers(self, kind: str) -> dict[str, Container]:
        """Return the containers of one new pod, with new volumes."""
        spec = pod(kind)
        claims = manifest(kind)["spec"].get("volumeClaimTemplates", [])
        named = [*spec.get("volumes", ()), *({"name": claim["metadata"]["name"]} for claim in claims)]
        volumes = {volume["name"]: self._volume(spec, volume) for volume in named}
        return {
            one["name"]: Container(spec, one, volumes, self.secrets, self.network, self._empty_directory())
            for one in containers(spec)
        }

    def _empty_directory(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._directory))

    def log(self, name: str) -> Path:
        return self._directory / f"{name}.log"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    need("pods")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, Network() as network:
        os.chmod(memory, 0o1777)
        yield Cluster(tmp_path, Path(memory), network)


def encoded(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def probes(kind: str) -> Iterator[str]:
    """Yield the URL of each probe of a pod's container."""
    [container] = pod(kind)["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[name]["httpGet"]
        yield f"{asked['scheme'].lower()}://127.0.0.1:{ports[asked['port']]}{asked['path']}"


#: A scrape of the PodMonitor: with its token, at an address that the certificate need not have.
SCRAPE = """
import ssl, sys, urllib.request
context = ssl.create_default_context(cafile="/etc/dissociated/ca.crt")
headers = {"Authorization": "Bearer " + sys.argv[2]}
asked = urllib.request.Request(sys.argv[1], headers=headers)
print(urllib.request.urlopen(asked, timeout=30, context=context).read().decode())
"""


def scrape(cluster: Cluster, kind: str) -> str:
    """Return the metrics of a pod, asked for as the PodMonitor says."""
    [endpoint] = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    [port] = [one["containerPort"] for one in pod(kind)["containers"][0]["ports"] if one["name"] == endpoint["port"]]
    url = f"{endpoint['scheme']}://{endpoint['tlsConfig']['serverName']}:{port}{endpoint['path']}"
    credentials = endpoint["authorization"]["credentials"]
    token = (cluster.secrets[credentials["name"]] / credentials["key"]).read_text()
    return cluster.containers("Job")["client"].run("python", "-c", SCRAPE, url, token).stdout.decode()


def test_pods_of_a_host_share_memory(cluster: Cluster) -> None:
    """A catalog, a node, a writer and a reader in place: each in its own namespaces, as another pod's processes are."""
    with ExitStack() as stack:
        catalog = cluster.containers("StatefulSet")
        catalog["directory"].run()
        serving = stack.enter_context(catalog["catalog"].start(cluster.log("catalog")))
        serving.wait_until_it_serves()
        node = stack.enter_context(cluster.containers("DaemonSet")["node"].start(cluster.log("node")))
        node.wait_until_it_serves()
        assert cluster.network.get(*probes("StatefulSet"), *probes("DaemonSet")) == "ok\n" * 6
        client = cluster.containers("Job")["client"]
        refused = client.run("dissociated", "put", "-", "flights", given=encoded(TABLE), check=False)
        assert refused.returncode != 0, "its token may read only"
        client.run(
            "env", f"DISSOCIATED_TOKEN={cluster.token}", "dissociated", "put", "-", "flights", given=encoded(TABLE)
        )
        assert pa.ipc.open_stream(client.run().stdout).read_all() == TABLE
        pytest.importorskip("prometheus_client")
        assert "dissociated_node_alive{" in scrape(cluster, "StatefulSet")
        assert "dissociated_store_limit_bytes 8.589934592e+09" in scrape(cluster, "DaemonSet")
        assert (node.terminate(), serving.terminate()) == (0, 0)


def test_containers_of_a_pod_share_memory(cluster: Cluster) -> None:
    """A node as a sidecar, with its store in a memory-backed volume that fsGroup has opened to the group."""
    parts = cluster.containers("Pod")
    with parts["node"].start(cluster.log("node")) as node:
        node.wait_until_it_serves()
        parts["node"].run(*containers(pod("Pod"))[0]["startupProbe"]["exec"]["command"])
        assert parts["program"].run().stdout == b"[1, 2, 3]\n"
        assert node.terminate() == 0


def test_the_root_of_a_container_is_read_only(cluster: Cluster) -> None:
    """Otherwise the other tests would show nothing about it."""
    client = cluster.containers("Job")["client"]
    tried = client.run("sh", "-c", "id -u; touch /tmp/ours; touch /usr/x /var /x", check=False)
    assert (tried.stdout, tried.returncode) == (f"{USER}\n".encode(), 1)
    assert tried.stderr.count(b"Read-only file system") == 3


def test_settings_of_spark_exist() -> None:
    """Each setting of the page that is about Kubernetes is in Spark's own library for it."""
    pyspark = pytest.importorskip("pyspark")
    [library] = Path(pyspark.__file__).parent.glob("jars/spark-kubernetes_*.jar")
    with ZipFile(library) as jar:
        known = b"".join(jar.read(f"org/apache/spark/deploy/k8s/{name}.class") for name in ("Config$", "Constants$"))
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    settings = set(re.findall(r"--conf \$kube(\.[A-Za-z.]+)=", page))
    assert settings
    assert [setting for setting in settings if f"spark.kubernetes{setting}".encode() not in known] == []
