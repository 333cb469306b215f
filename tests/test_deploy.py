"""The files of `deploy/`, run as far as a machine without Docker can: units are verified, commands are started."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dissociated as dis
from support.processes import Start, free_port

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
TABLE = pa.table({"n": [1, 2, 3]})


def unit_command(unit: Path) -> str:
    text = unit.read_text().replace("\\\n", " ")
    return re.search(r"^ExecStart=(.*)$", text, re.M)[1]  # type: ignore[index]


def compose_command(service: str) -> str:
    """Return the command of a compose service, parsed without a YAML library: the lines below `command: >-`."""
    text = (DEPLOY / "compose.yaml").read_text()
    block = re.search(rf"^  {service}:\n(?:    .*\n)*?    command: >-\n((?:      .*\n)+)", text, re.M)
    assert block is not None
    return "dissociated " + " ".join(block[1].split())


def image_command() -> str:
    text = (DEPLOY / "Dockerfile").read_text()
    parts = [json.loads(re.search(rf"^{word} (.*)$", text, re.M)[1]) for word in ("ENTRYPOINT", "CMD")]  # type: ignore[index]
    return shlex.join([*parts[0], *parts[1]])


def adapted(command: str, directory: Path) -> tuple[list[str], dict[str, str]]:
    """Return the arguments with our own directories and free ports, and the map from original to free ports."""
    ports: dict[str, str] = {}
    for port in dict.fromkeys(re.findall(r":(\d{4})\b", command)):
        ports[port] = str(free_port())
        command = re.sub(rf":{port}\b", f":{ports[port]}", command)
    for place in ("/dev/shm/", "/var/lib/", "/arrow/"):
        command = command.replace(f" {place}", f" {directory}/")
    program, *arguments = shlex.split(command.replace("--advertise node", "--advertise 127.0.0.1"))
    assert Path(program).name == "dissociated"
    return arguments, ports


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_takes_the_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze on this machine")
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"=/opt/\S+", f"={sys.executable}", unit.read_text()).replace("User=arrow", "User=root"))
    found = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, timeout=60)
    about_it = [line for line in found.stderr.splitlines() if unit.name in line]
    assert (found.returncode, about_it) == (0, [])


@pytest.mark.parametrize(
    "command",
    [unit_command(DEPLOY / "dissociated-node.service"), compose_command("node"), image_command()],
    ids=["systemd", "compose", "image"],
)
def test_the_node_of_a_deployment_serves(command: str, tmp_path: Path, start: Start) -> None:
    (tmp_path / "arrow").mkdir(mode=0o700)
    arguments, ports = adapted(command, tmp_path)
    node = start(*arguments)
    with dis.connect(f"grpc://127.0.0.1:{ports['8815']}") as client:
        client.put("t", TABLE)
        for transport in ("shm", "tcp", "grpc"):
            assert client.read("t", transport=transport).read_all() == TABLE
        schemes = {where.partition(":")[0] for end in client.describe("t").endpoints for where in end.locations}
        assert {"shm", "tcp"} <= schemes
    with urllib.request.urlopen(f"http://127.0.0.1:{ports['8080']}/healthz", timeout=10) as answer:
        assert answer.read() == b"ok\n"
    assert node.terminate() == 0


def test_the_catalog_of_a_deployment_has_nodes(tmp_path: Path, start: Start) -> None:
    (tmp_path / "arrow").mkdir(mode=0o700)
    arguments, _ = adapted(unit_command(DEPLOY / "dissociated-catalog.service"), tmp_path)
    catalog = start(*arguments)
    port = catalog.uri.rpartition(":")[2]
    node = start(
        "node", "--store", tmp_path / "store", "--catalog", f"grpc://127.0.0.1:{port}", "--flight", "grpc://127.0.0.1:0"
    )
    with dis.connect(f"grpc://127.0.0.1:{port}") as client:
        client.put("t", TABLE)
        assert client.read("t").read_all() == TABLE
    assert (node.terminate(), catalog.terminate()) == (0, 0)


def test_the_image_can_be_built(tmp_path: Path) -> None:
    """Run the steps of the image with a directory in place of the image's root."""
    text = (DEPLOY / "Dockerfile").read_text()
    source = tmp_path / "source"
    for names, place in re.findall(r"^COPY ((?!--).*) (/\S+)$", text, re.M):
        target = tmp_path / place.strip("/")
        for name in names.split():
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, target)
    assert (source / "src" / "dissociated").is_dir()
    # The hashes are for the image's Python, so the packages that we need are not installed here: see the next test.
    pinned = "-r /source/deploy/requirements.txt"
    steps = [step for step in re.findall(r"^RUN (.*)$", text, re.M) if "/opt/" in step and not step.endswith(pinned)]
    # Take pip and our dependencies from this environment, and compile nothing, because that saves minutes.
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib"), "PIP_NO_COMPILE": "1"}

    def run(step: str) -> None:
        # Two rooms of the package stand for all bytecode, because compiling it takes seconds.
        here = re.sub(r"(compileall .* /opt/dissociated/lib)$", r"\1/python3.*/site-packages/dissociated/[bc]o*", step)
        here = here.replace("/opt/", f"{tmp_path}/opt/").replace("/source", str(source))
        here = here.replace("-m venv", "-m venv --without-pip").replace("/bin/pip ", "/bin/python -m pip ")
        here = re.sub(r"^python ", f"{sys.executable} ", here)
        subprocess.run(here, shell=True, check=True, env=environment, timeout=300, capture_output=True)

    for step in steps:
        run(step)
    [package] = (tmp_path / "opt/dissociated/lib").glob("python3.*/site-packages/dissociated")
    assert (package / "monitoring/page/index.html").is_file()
    # The wheel has the same bytes when it is built again from files with other times.
    [wheel] = (tmp_path / "opt/wheels").glob("*.whl")
    first = wheel.read_bytes()
    wheel.unlink()
    for file in source.rglob("*"):
        os.utime(file, (1, 1_000_000_000))
    # This is how pip builds it, without pip's own time.
    python, target = str(tmp_path / "opt/build/bin/python"), str(wheel.parent)
    build = [python, "-m", "hatchling", "build", "--target", "wheel", "--directory", target]
    subprocess.run(build, check=True, cwd=source, env=environment, timeout=300, capture_output=True)
    assert wheel.read_bytes() == first
    # Bytecode names the hash of its source (PEP 552), not its time, which differs from build to build.
    [bytecode] = (package / "control" / "__pycache__").glob("access.*.pyc")
    assert int.from_bytes(bytecode.read_bytes()[4:8], "little") == 1
    told = subprocess.run(
        [tmp_path / "opt/dissociated/bin/dissociated", "--version"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert told.stdout.startswith("dissociated ")


@pytest.mark.parametrize(
    ("file", "extra"), [("requirements.txt", "metrics"), ("build-requirements.txt", None)], ids=["image", "build"]
)
def test_all_packages_of_the_image_are_pinned(file: str, extra: str | None) -> None:
    """Every package that the project needs has an allowed version in the file, with hashes. pip refuses any other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["build-system"]["requires"]
    if extra is not None:
        needed = project["project"]["dependencies"] + project["project"]["optional-dependencies"][extra]
    pins = {}
    for line in (DEPLOY / file).read_text().replace("\\\n", " ").splitlines():
        if not line.startswith("#"):
            pin, *hashes = line.split()
            assert hashes
            assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes)
            name, version = pin.split("==")
            pins[canonicalize_name(name)] = version
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])
