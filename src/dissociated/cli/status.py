"""The command status: shows the activity of a server."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from dissociated.cli import access, quantities, target, terminal, text
from dissociated.errors import DissociatedError, OptionError
from dissociated.monitoring.status import ConsumerStatus, DatasetStatus, NodeStatus, ServerStatus, StoreStatus

_STATUS = """\
Show the datasets of a server, a node or a catalog, with their readers, leases and transfer rates.

In a terminal, the view is updated until Ctrl-C. Elsewhere, and with --once or --json, it is printed once. Rates are
averages since the last update. The first rates are averages since each connection and the server started."""
_CLEAR = "\x1b[H\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen, without a cursor


def add_status(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `status` to its parser."""
    parser.description = _STATUS
    target.add_arguments(parser, "URI", optional=True)
    parser.add_argument("--once", action="store_true", help="show the status once, also in a terminal")
    parser.add_argument("--json", action="store_true", help="print JSON once, for other programs")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="TIME", help="time between updates (default: 1s)"
    )
    parser.set_defaults(run=_run_status)


def _interval(written: str) -> float:
    seconds = quantities.duration(written)
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{written!r} is not within 0.1s and 1h")
    return seconds


def _run_status(arguments: argparse.Namespace) -> None:
    """Print the status, once or repeatedly."""
    catalog, name = target.find(arguments)
    if name:
        raise OptionError(
            f"status shows a whole server, not the dataset {name!r}: dissociated describe shows a dataset"
        )
    with access.client(catalog, arguments) as client:
        now = client.status()
        if arguments.json:
            print(json.dumps(now.plain(), indent=2))
        elif arguments.once or not sys.stdout.isatty():
            print("\n".join(_render(now, None, terminal.width(sys.stdout))))
        else:
            _watch(client.status, now, arguments.interval)


def _watch(fetch: Callable[[], ServerStatus], now: ServerStatus, interval: float) -> None:
    """Show the status from `fetch` repeatedly, until interrupted. If the server does not answer, try again."""
    before: ServerStatus | None = None
    problem = ""
    sys.stdout.write(_ENTER)
    try:
        while True:
            width, height = shutil.get_terminal_size()
            lines = [*([text.printable(problem), ""] if problem else []), *_render(now, before, width)]
            if len(lines) > height - 1:
                lines[height - 2 :] = [f"... and {len(lines) - height + 2} more lines"]
            sys.stdout.write(_CLEAR + "\n".join(line[:width] for line in lines))
            sys.stdout.flush()
            time.sleep(interval)
            try:
                before, now = now, fetch()
                problem = ""
            except DissociatedError as error:
                problem = f"{time.strftime('%H:%M:%S')} trying again: {error}"
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


def _render(now: ServerStatus, before: ServerStatus | None, width: int | None) -> list[str]:
    """Return the lines of the view. Tables narrower than `width` leave out columns, and sentences are wrapped."""
    if before is not None and (before.pid != now.pid or before.seconds >= now.seconds):
        before = None  # the server was restarted
    totals = now.totals
    since = now.seconds if before is None else now.seconds - before.seconds
    sent_bytes = totals.bytes if before is None else totals.bytes - before.totals.bytes
    lines = [
        f"dissociated {now.version} on {now.host}, process {now.pid}, for {text.duration(now.seconds)}",
        f"sent {text.size(totals.bytes)} in {text.plural(totals.messages, 'message')} of "
        f"{text.plural(totals.streams, 'stream')}, {text.size(sent_bytes / since) if since else '-'}/s; "
        f"{text.plural(now.leases, 'lease')} held",
        f"connections ended: {totals.done:,} done, {totals.gone:,} gone, {totals.refused:,} refused, "
        f"{totals.failed:,} failed; streams over Flight: {totals.flight:,}",
    ]
    if now.state != "running":
        peers = {consumer.connection: f"#{consumer.connection} {consumer.peer}" for consumer in now.consumers}
        waited_for = ", ".join(peers.get(number, f"#{number}") for number in now.waits_for)
        lines.insert(1, f"{now.state}, and waits for {waited_for or 'nobody any more'}")
    changed = {kind: count for kind, count in vars(now.changed).items() if count}
    if changed:
        lines.append("versions of datasets: " + ", ".join(f"{count:,} {kind}" for kind, count in changed.items()))
    if now.unreadable_parts:
        parts, names = text.plural(now.unreadable_parts, "part"), ", ".join(now.unreadable_datasets)
        lines.append(f"{parts} cannot be read, since no node that is alive can serve the data: {text.printable(names)}")
    if totals.refused_puts:
        lines.append(f"{text.plural(totals.refused_puts, 'put')} refused")
    if now.kept:
        lines.append(f"consumers that were cut off hold {text.size(now.kept)} until they free it")
    if now.store is not None:
        lines += _store_lines(now.store)
    lines = [*_wrap(lines, width), ""]
    listeners = [
        (listener.uri, f"{listener.open:,}", f"{listener.accepted:,}", f"{listener.refused:,}")
        for listener in now.listeners
    ]
    lines += _table_lines(("LISTENING AT", "OPEN", "ACCEPTED", "REFUSED"), listeners, (1, 2, 3), width)
    nodes = [(node.host, _state(node), f"{text.duration(node.seconds)} ago", node.catalog) for node in now.nodes]
    lines += _table_lines(("NODE", "STATE", "LAST HEARD", "CATALOG"), nodes, (2,), width)
    problems = [f"{node.host}: {node.problem}" for node in now.nodes if node.problem]
    problems += [
        f"{node.host} has been away for {text.duration(node.seconds)}: start its node again, or remove it with its "
        f"datasets: dissociated forget {node.host}"
        for node in now.nodes
        if node.registered and not node.alive
    ]
    if now.problem:
        problems.append(f"the catalog of this node: {now.problem}")
    lines += [*_wrap(problems, width), ""] if problems else []
    previous = {} if before is None else {dataset.name: dataset for dataset in before.datasets}
    rates: dict[str | None, float] = defaultdict(float)
    for reader in now.consumers:
        rates[reader.dataset] += reader.rate
    datasets = [
        _dataset_row(dataset, previous.get(dataset.name), since, rates.get(dataset.name)) for dataset in now.datasets
    ]
    head = ("DATASET", "ROWS", "SIZE", "CONSUMERS", "STREAMS", "SENT", "RATE", "LEASES")
    lines += _table_lines(head, datasets, range(1, 8), width)
    consumers = [_consumer_row(consumer) for consumer in now.consumers]
    columns = ("#", "CONSUMER", "DATASET", "STATE", "FOR", "MESSAGES", "SENT", "RATE", "LEASES")
    return lines + _table_lines(columns, consumers, (0, 4, 5, 6, 7, 8), width)


def _store_lines(store: StoreStatus) -> list[str]:
    """Return lines about the contents of the store, its limit, and the entries that are set aside."""
    limit = store.effective_limit
    maximum = "" if limit is None else f" of at most {text.size(limit)}"
    if limit is not None and limit != store.limit:
        own = "no limit is set" if store.limit is None else f"the limit is {text.size(store.limit)}"
        maximum += f": {own}, and the file system has {text.size(store.free)} free"
    full = ["the store is full: drop datasets, or give it more room"] if store.room == 0 else []
    log = f", log {store.log}" if store.log else ""
    where = [f"store {store.directory}{log}"] if store.directory else []
    return [*where, f"the store holds {text.size(store.held)}{maximum}", *full, *store.set_aside]


def _state(node: NodeStatus) -> str:
    if not node.registered:
        return "refused"
    return "alive" if node.alive else "away"


def _dataset_row(
    now: DatasetStatus, before: DatasetStatus | None, since: float, reading: float | None
) -> tuple[str, ...]:
    rate = reading if before is None or not since else max(0, now.bytes - before.bytes) / since
    return (
        now.name,
        text.count(now.rows),
        text.size(now.size),
        text.count(now.consumers),
        text.count(now.streams),
        text.size(now.bytes),
        "-" if rate is None else f"{text.size(rate)}/s",
        text.count(now.leases),
    )


def _consumer_row(now: ConsumerStatus) -> tuple[str, ...]:
    return (
        str(now.connection),
        now.peer,
        now.dataset or "-",
        f"{now.state}, {text.count(now.missed)} missed" if now.missed else now.state,
        text.duration(now.seconds),
        text.count(now.messages),
        text.size(now.bytes),
        f"{text.size(now.rate)}/s" if now.state == "reading" else "-",
        text.count(now.leases),
    )


def _table_lines(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int], width: int | None
) -> list[str]:
    return [*text.narrow_table(head, rows, right, width).splitlines(), ""] if rows else []


def _wrap(lines: Iterable[str], width: int | None) -> list[str]:
    """Wrap lines at `width`, if there is one. Control characters are escaped."""
    printable = [*map(text.printable, lines)]
    if width is None:
        return printable
    return [
        part
        for line in printable
        for part in textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False) or [""]
    ]
