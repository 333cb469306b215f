"""The proof of what is promised about several hosts: `python -m cluster.prove`, run in `tests/` as root.

It runs the tests about each subject, and measures what no test may: round trips, throughput beside iperf3 and Flight,
waits, and rows after a process was killed or a link was cut, also under Spark. It prints a row for each of them, and
ends with status 1 if one did not come out as expected. `python -m cluster.prove 5 7` runs the subjects 5 and 7. iperf3
is found on the PATH, or named by the variable IPERF3.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from cluster import rates, rounds
from cluster.hosts import Cluster, answer, missing
from cluster.test_hosts import APPEND, CATALOG, PART, READ, serve_catalog
from dissociated.cli import text
from support import machine
from support.forks import forking
from support.helpers import wait_until
from support.processes import Process

TESTS = Path(__file__).parents[1]
AWAY = 4  # seconds for which a process is dead, or a link is cut
NODE = (
    *("node", "--catalog", CATALOG, "--heartbeat", "1", "--store", "/dev/shm/store"),
    *("--listen", "shm:", "--listen", "tcp://0.0.0.0:8816", "--flight", "grpc://0.0.0.0:8817"),
)
SUBJECTS = {
    1: "parts in parallel",
    2: "parts that wait for their turn",
    3: "round trips",
    4: "processor time",
    5: "what is killed or cut off under a job",
    6: "nodes beside a service",
    7: "a closed data port",
    8: "listeners on all interfaces",
    9: "clocks",
    10: "addresses that nobody reaches",
    11: "monitoring",
    12: "ports and other addresses",
}
#: The tests about each subject.
TESTED = {
    1: [
        "client/test_parts.py::test_parts_are_requested_at_once",
        "client/test_readahead.py::test_parts_are_received_while_the_first_is_read",
        "cluster/test_hosts.py::test_parts_on_two_hosts_are_received_at_once_and_by_flight_if_a_firewall_drops_the_data_port",
    ],
    2: [
        "client/test_parts.py::test_a_part_that_waits_for_its_turn_is_not_cut_off",
        "client/test_parts.py::test_a_reader_that_was_cut_off_is_told_why",
    ],
    3: [
        "client/test_idle.py::test_reads_follow_each_other_on_one_connection",
        "client/test_idle.py::test_a_read_by_handle_takes_one_round_trip",
    ],
    5: [
        "cluster/test_hosts.py::test_puts_and_appends_over_a_link_that_is_cut_count_once",
        "node/test_node.py::test_a_catalog_killed_during_a_commit_has_it_whole_or_not_at_all",
        "spark/test_nodes_away.py::test_jobs_wait_for_the_node_of_their_host",
        "spark/test_nodes_away.py::test_a_commit_waits_for_a_node_that_has_segments",
        "spark/test_cluster.py::test_what_is_killed_within_a_task_is_done_again_once",
    ],
    6: [
        "node/test_local.py::test_a_host_that_has_a_node_waits_for_it_and_starts_no_second_one",
        "node/test_local.py::test_a_node_that_was_started_for_a_writer_starts_again_and_goes_when_it_is_empty",
    ],
    7: ["client/test_parts.py::test_flight_is_the_last_way_to_data_whose_port_answers_nothing"],
    8: [
        "cluster/test_hosts.py::"
        "test_a_listener_on_all_interfaces_is_read_from_another_host_and_says_which_ports_are_closed"
    ],
    9: [
        "node/test_members.py::test_the_time_of_the_catalog_decides_on_tickets",
        "node/test_members.py::test_a_node_whose_clock_is_behind_takes_part_in_a_commit_that_takes_a_while",
    ],
    10: [
        "cluster/test_hosts.py::test_a_node_that_announces_its_loopback_address_to_another_host_is_refused",
        "node/test_members.py::test_a_node_that_the_catalog_cannot_reach_is_refused",
        "node/test_members.py::test_an_error_of_the_catalog_names_one_catalog_however_many_passed_it_on",
    ],
    11: [
        "node/test_members.py::test_a_catalog_tells_prometheus_of_its_nodes_and_of_what_they_took_along",
        "node/test_members.py::test_forget_removes_a_node_for_good_and_its_datasets",
        "cluster/test_hosts.py::test_a_reader_whose_host_is_gone_is_noticed_and_one_that_only_pauses_is_kept",
    ],
    12: ["node/test_members.py::test_a_node_behind_a_port_mapping_announces_the_mapped_ports"],
}
#: A reader that prints the rows that it gets three times, and the seconds that each read takes.
TIMED = """
import sys, time, dissociated as dis
with dis.connect(sys.argv[1], timeout=float(sys.argv[2])) as client:
    for _ in range(3):
        began = time.monotonic()
        rows = client.read("d").read_all().num_rows
        print(rows, round(time.monotonic() - began, 1), flush=True)
"""
#: A client that puts and appends over a transport, and reads over others.
PUT_AND_READ = """
import sys, pyarrow as pa, dissociated as dis
with dis.connect(sys.argv[1], timeout=20) as client:
    client.put("p", pa.table({"n": [1, 2]}), transport=sys.argv[2])
    client.put("p", pa.table({"n": [3]}), mode="append", transport=sys.argv[2])
    print([client.read("p", transport=one).read_all()["n"].to_pylist() for one in sys.argv[3:]])
"""
#: A reader that prints whether a dataset has each of so many numbers once.
CHECK = """
import sys, numpy as np, dissociated as dis
with dis.connect(sys.argv[1]) as client:
    print(np.array_equal(np.sort(client.read("rows").read_all()["id"].to_numpy()), np.arange(int(sys.argv[2]))))
"""
NODES = """
import sys, dissociated as dis
with dis.connect(sys.argv[1]) as client:
    print(*sorted(node["host"] for node in client.nodes()))
"""


class Row(NamedTuple):
    """A row of the proof. `held` is None for a figure without a goal, and for a test that was skipped."""

    done: str
    expected: str
    came_out: str
    held: bool | None


def tested(*names: str) -> Iterator[Row]:
    """Run tests, and yield a row for each."""
    if not names:
        return
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            f"--junitxml={report}",
            f"--basetemp={directory}/tests",
            *names,
        ]
        output = subprocess.run(command, cwd=TESTS, capture_output=True, text=True).stdout
        if not report.exists():
            yield Row("the tests", "run", output.strip().splitlines()[-1], False)
            return
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            name, _, parameters = case.attrib["name"].removeprefix("test_").replace("_", " ").partition("[")
            done = f"the test: {name}" + (f" ({parameters.removesuffix(']')})" if parameters else "")
            trouble = next((found for kind in ("failure", "error", "skipped") for found in case.iter(kind)), None)
            if trouble is None:
                yield Row(done, "it passes", f"passed in {float(case.attrib['time']):.0f} s", True)
            else:
                reason = trouble.attrib.get("message", "").splitlines()[:1]
                yield Row(done, "it passes", f"{trouble.tag}: {' '.join(reason)}", trouble.tag == "skipped" and None)


def within(call: str, most: float) -> Row:
    """Return the row of a call that may wait for `most` round trips. The processor may take a fifth of one."""
    count = trips()[call]
    return Row(call, f"{most:.2f} round trips, and 0.2 for the processor", f"{count:.2f}", count <= most + 0.2)


@cache
def trips() -> dict[str, float]:
    return rounds.measure()


def parts_in_parallel() -> Iterator[Row]:
    """Round trips of ten parts and of one, and the throughput of two hosts and of one."""
    for transport in ("tcp", "grpc"):
        one = trips()[f"read over {transport} by name, warm"]
        yield within(f"read over {transport} of ten parts, warm", one + 1)
        yield within(f"read over {transport} of ten parts, again", one + 1)
    for delay in (0.001, 0.01):
        measured = rates.measure(delay)
        done = f"30 MB from each host at 10 MB/s, {2000 * delay:g} ms there and back: "
        for name, rate in measured.items():
            yield Row(done + name, "near iperf3", f"{rate:.1f} MB/s", None)
        gain = measured["tcp, two hosts"] / measured["tcp, one host"]
        yield Row(done + "two hosts of one", "at least 1.9 times", f"{gain:.2f}", gain >= 1.9)


def round_trips() -> Iterator[Row]:
    """Round trips of warm reads, and of all calls."""
    for transport, relayed in (("tcp", 0), ("grpc", 1)):  # the catalog relays a read over Flight to the node
        for call, most in ((f"read over {transport} by name, warm", 2), (f"read over {transport} by handle", 1)):
            yield within(call, most + relayed)
    for call, count in trips().items():
        yield Row(call, "", f"{count:.2f} round trips", None)


def processor_time() -> Iterator[Row]:
    """The processor time for each gigabyte, of both sides, beside Flight and iperf3."""
    command = [sys.executable, "-m", "benchmarks", "hosts", "--gigabytes", "0.2", "--rounds", "3"]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    for line in done.stdout.splitlines()[3:]:
        if (cells := line.split("  ")) and (cells := [cell.strip() for cell in cells if cell.strip()]):
            shape, over, _, _, _, both, of_flight = cells
            came_out = f"{of_flight} times ({both} ms/GB)"
            is_ours = over == "tcp"
            goal = "at most that of Flight" if is_ours else ""
            yield Row(f"batches of {shape} over {over}", goal, came_out, float(of_flight) <= 1 if is_ours else None)


class Service:
    """A catalog on host a and nodes on b and c, which can be started again. Host d is a client's."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.starts: dict[str, Callable[[], Process]] = {
            "a": lambda: serve_catalog(cluster, directory),
            "b": lambda: cluster["b"].dissociated(*NODE),
            "c": lambda: cluster["c"].dissociated(*NODE),
        }
        self.processes = {name: start() for name, start in self.starts.items()}

    def restart(self, name: str) -> None:
        """Kill a process, and start it again after some seconds."""
        self.processes[name].kill()
        time.sleep(AWAY)
        self.processes[name] = self.starts[name]()

    def cut(self, name: str) -> None:
        """Cut the link of a host for some seconds."""
        self.cluster.cut(name)
        time.sleep(AWAY)
        self.cluster.mend(name)

    def run(self, host: str, program: str, *arguments: object) -> str:
        """Run a program that connects to the catalog. Return its output; if it fails, the last line is its error."""
        done = self.cluster[host].run("-c", program, CATALOG, *map(str, arguments), check=False)
        errors = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        return (done.stdout + "".join(errors)).strip()


@contextmanager
def four_hosts(delay: float = 0.0) -> Iterator[tuple[Service, Path]]:
    """Yield the service on four hosts, and a directory."""
    with tempfile.TemporaryDirectory() as name, Cluster("a", "b", "c", "d", delay=delay) as cluster:
        yield Service(cluster, Path(name)), Path(name)


def killed_or_cut() -> Iterator[Row]:
    """Appends of a client, and jobs of Spark, while processes are killed and links are cut."""
    with four_hosts(0.005) as (service, _):
        client = service.cluster["d"].start("-c", APPEND, CATALOG)
        for lose, name in ((service.restart, "b"), (service.restart, "a"), (service.cut, "b"), (service.cut, "d")):
            for _ in range(3):
                assert answer(client) == "appended\n"
            lose(name)
        printed, _ = client.communicate("stop\n", timeout=100)
        count = int(printed.split()[-1])
        wait_until(lambda: "[" in service.run("c", READ, "tcp"), "all nodes are heard again", 60)
        came_out = service.run("c", READ, "tcp")
        held = came_out == str([*range(count)])
        done = f"a client appends: node and catalog are killed, and links of node and client are cut, for {AWAY} s"
        yield Row(done, "each append once", f"{count} appends, each once" if held else came_out, held)
    yield from spark_jobs()


def spark_jobs() -> Iterator[Row]:
    """Jobs of Spark, each of which loses something when its first task runs."""
    if reason := machine.missing("java"):
        yield Row("jobs of Spark", "", reason, None)
        return
    from cluster.jobs import ROWS, Spark  # needs pyspark

    with four_hosts() as (service, directory), Spark.on(service.cluster, CATALOG, directory) as spark:
        losses: dict[str, Callable[[], None]] = {
            "a Python worker is killed": lambda: spark.kill("pyspark.daemon"),
            "an executor is killed": lambda: spark.kill("CoarseGrainedExecutorBackend"),
            f"a node is killed for {AWAY} s": lambda: service.restart("b"),
            f"the catalog is killed for {AWAY} s": lambda: service.restart("a"),
            f"the link of a host is cut for {AWAY} s": lambda: service.cut("b"),
        }
        count = 0
        for jvm, way in ((True, "by Spark's JVM"), (False, "by Python")):
            for what, lose in losses.items():
                done = spark.write(count, ROWS, jvm, lose)
                count += ROWS if (written := done == "written") else 0
                held = service.run("d", CHECK, count) == "True"
                came_out = f"{count} rows in all, {'each once' if held else 'not each once'}"
                trouble = "" if written else f"{done}; "
                yield Row(f"Spark appends {way}: {what}", "each row once", trouble + came_out, held and written)
                done = spark.read(jvm, lose)
                expected = f"{count} rows with the sum {sum(range(count))}"
                yield Row(f"Spark reads {way}: {what}", expected, done, done == expected)
        nodes = service.run("d", NODES)
        yield Row("nodes that the catalog knows after these jobs", "b c", nodes, nodes == "b c")


def closed_data_port() -> Iterator[Row]:
    """Reads past a firewall that drops the data port, and from a host that is cut off."""
    with four_hosts() as (service, _):
        service.run("b", PART, 0)
        service.cluster.allow("b", 8817)
        reads = [line.split() for line in service.run("d", TIMED, 60).splitlines()]
        seconds = [float(read[1]) for read in reads]
        held = all(read[0] == "2000000" for read in reads) and 3 <= seconds[0] < 6 and max(seconds[1:]) < 2
        came_out = f"{', '.join(f'{second:.1f}' for second in seconds)} s"
        yield Row("three reads of 16 MB, the data port is closed", "3 s more for the first alone", came_out, held)
        service.cluster.cut("b")
        began = time.monotonic()
        came_out = service.run("d", TIMED, 10).splitlines()[-1]
        seconds = [time.monotonic() - began]
        held = "Error" in came_out or "Unreachable" in came_out
        yield Row(
            "a read with a timeout of 10 s, the node's host is cut off",
            "an error in time",
            f"{came_out}, after {seconds[0]:.1f} s",
            held,
        )


def ports() -> Iterator[Row]:
    """Puts, appends and reads over all transports through a firewall that opens the ports of docs/running.md."""
    with four_hosts() as (service, _):
        for name, opened in (("a", [8815]), ("b", [8816, 8817]), ("c", [8816, 8817]), ("d", [])):
            service.cluster.allow(name, *opened)
        for host, put, reads in (("b", "shm", ["shm", "tcp", "grpc"]), ("d", "grpc", ["tcp", "grpc"])):
            came_out = service.run(host, PUT_AND_READ, put, *reads)
            expected = str([[1, 2, 3]] * len(reads))
            done = f"put and append over {put}, read over {', '.join(reads)}, with the ports of docs/running.md alone"
            yield Row(done, expected, came_out, came_out == expected)


MEASURED: dict[int, Callable[[], Iterator[Row]]] = {
    1: parts_in_parallel,
    3: round_trips,
    4: processor_time,
    5: killed_or_cut,
    7: closed_data_port,
    12: ports,
}


def main() -> None:
    """Print a row for each case as it ends, and all of them as a table."""
    if reason := missing():
        sys.exit(f"this machine has no such hosts: {reason}")
    if iperf3 := os.environ.get("IPERF3"):
        os.environ["PATH"] = f"{Path(iperf3).parent}:{os.environ['PATH']}"
    chosen = [int(argument) for argument in sys.argv[1:]] or [*SUBJECTS]
    rows: list[tuple[str, ...]] = []
    failed = 0
    for number in chosen:
        print(f"{number}. {SUBJECTS[number]}", file=sys.stderr, flush=True)
        with forking() if number in MEASURED else nullcontext():
            for row in chain(tested(*TESTED.get(number, [])), MEASURED.get(number, lambda: iter(()))()):
                failed += row.held is False
                held = {True: "yes", False: "NO", None: "-"}[row.held]
                rows.append((str(number), held, row.done, row.expected, row.came_out))
                print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    print(text.table(("ITEM", "HELD", "DONE", "EXPECTED", "CAME OUT"), rows))
    if shutil.which("iperf3") is None:
        print("iperf3 is neither on the PATH nor named by IPERF3, so its figures are missing")
    print(f"{len(rows)} rows, {failed} not as expected")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
