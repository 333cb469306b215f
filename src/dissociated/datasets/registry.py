"""The registry of the datasets that a process serves. It alone maps tickets and names to datasets.

Publishing, replacing, dropping, expiry and eviction each change the registry once. The versions and parts of a dataset
are in the catalog's database; the registry knows only the datasets that are served by this process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from dissociated.base.display import advise_name
from dissociated.control.access import UNKNOWN_TICKET, Grant, Signer, Ticket, Unsigned
from dissociated.datasets.base import Dataset, IsGone
from dissociated.datasets.sources import isolate_columns
from dissociated.datasets.streamed import select
from dissociated.errors import DatasetNotFound, DissociatedError, FilterRefused
from dissociated.protocol.request import Selection


class Registry:
    """The datasets that a process serves, by name, by the identifier in their tickets, and by part id. Thread-safe.

    A part of a version of a catalog need not have a name here. Withdrawing a dataset also drops it: its streams go on,
    but a broadcast stream ends.
    """

    def __init__(self, tickets: Signer | Unsigned, applies_filters: bool = True) -> None:
        self.tickets = tickets
        #: The seconds to add to the clock of this host for the time that decides about tickets. On a node, that is the
        #: time of its catalog, which signs them.
        self.clock_offset = 0.0
        self._applies_filters = applies_filters
        self._lock = threading.Lock()
        self._closed = False
        self._by_name: dict[str, Dataset] = {}
        self._by_identifier: dict[bytes, Dataset] = {}
        self._by_part: dict[str, Dataset] = {}

    def now(self) -> float:
        """Return the time that decides about tickets, in seconds since the epoch."""
        return time.time() + self.clock_offset

    def publish(self, new: Dataset) -> Dataset | None:
        """Serve `new` under its name.

        Returns:
            The dataset that had this name, or None. It is still served by its own ticket until it is withdrawn.

        Raises:
            DissociatedError: Another dataset has the same ticket, or the registry is closed.
        """
        with self._lock:
            self._check_open()
            old = self._by_name.get(new.name)
            if self._by_identifier.get(new.ticket, old) is not old:
                raise DissociatedError(f"the ticket for {new.name!r} is already the ticket of another dataset")
            self._by_name[new.name] = self._by_identifier[new.ticket] = new
            return old

    def serve(self, part: str, dataset: Dataset, named: bool = False) -> Dataset:
        """Serve a part by its ticket.

        Args:
            part: The id of the part.
            dataset: The data of the part, unless a dataset is served as this part already.
            named: Whether the part is served under the name of the dataset, too.

        Returns:
            The dataset that is served as this part.

        Raises:
            DissociatedError: The registry is closed.
        """
        with self._lock:
            self._check_open()
            dataset = self._by_part.setdefault(part, dataset)
            named_now = self._by_name.get(dataset.name)
            self._by_identifier[dataset.ticket] = dataset
            if named or (named_now is not None and named_now.ticket == dataset.ticket):
                self._by_name[dataset.name] = dataset
            return dataset

    def assign_part(self, part: str, dataset: Dataset) -> None:
        """Assign the id `part` to a dataset that is published already."""
        with self._lock:
            self._by_part[part] = dataset

    def lookup_part(self, part: str) -> Dataset | None:
        """Return the dataset that is served as the part with this id, or None."""
        with self._lock:
            return self._by_part.get(part)

    def withdraw(self, dataset: Dataset) -> None:
        """Stop serving `dataset`, and drop it."""
        with self._lock:
            self._forget(dataset)
        dataset.drop()

    def _forget(self, dataset: Dataset) -> None:
        if self._by_identifier.get(dataset.ticket) is dataset:
            del self._by_identifier[dataset.ticket]
        if self._by_name.get(dataset.name) is dataset:
            del self._by_name[dataset.name]

    def restore(self, old: Dataset | None) -> None:
        """Serve a part under its name and its ticket again, after the dataset that replaced it was withdrawn.

        A part that was withdrawn meanwhile stays so. None is ignored.
        """
        with self._lock:
            if old is not None and any(dataset is old for dataset in self._by_part.values()):
                self._by_name.setdefault(old.name, old)
                self._by_identifier.setdefault(old.ticket, old)

    def withdraw_parts(self, parts: Iterable[str]) -> None:
        """Stop serving the parts with these ids. Ids that are not served are ignored."""
        with self._lock:
            datasets = [self._by_part.pop(part) for part in parts if part in self._by_part]
            for dataset in datasets:
                self._forget(dataset)
        for dataset in datasets:
            dataset.drop()

    def find_name(self, name: str) -> Dataset | None:
        """Return the dataset that is published under `name`, or None."""
        with self._lock:
            return self._by_name.get(name)

    def lookup_name(self, name: str) -> Dataset:
        """Return the dataset that is published under `name`.

        Raises:
            DatasetNotFound: There is none.
            DissociatedError: There is none because the registry is closed.
        """
        dataset = self.find_name(name)
        if dataset is None:
            self._check_open()
            advice = advise_name(name, self.names(), "server.names()")
            raise DatasetNotFound(f"no dataset {name!r} is published here: {advice}")
        return dataset

    def lookup(self, identifier: bytes) -> Dataset | None:
        """Return the dataset with this identifier, for which tickets are made, or None if it is not served here."""
        with self._lock:
            return self._by_identifier.get(identifier)

    def resolve_ticket(self, ticket: bytes, part: str | None, is_gone: IsGone) -> tuple[Dataset, Dataset]:
        """Resolve a ticket.

        Args:
            ticket: The ticket.
            part: The id of the part, which tells publications with the same ticket apart; None for the current one.
            is_gone: See `Dataset.open_reader_for`.

        Returns:
            The published dataset, and the part of it that the ticket grants: the dataset itself, or some columns.

        Raises:
            DatasetNotFound: The dataset is not served any more.
            AccessDenied: The ticket is foreign, altered or expired.
        """
        identifier, columns = self.tickets.check(ticket, self.now())
        dataset = self.lookup(identifier) if part is None else self.lookup_part(part)
        if dataset is None or dataset.ticket != identifier:
            raise DatasetNotFound(UNKNOWN_TICKET)
        return dataset, dataset if columns is None else isolate_columns(dataset, columns, is_gone)

    def select(self, whole: Dataset, selection: Selection | None) -> Dataset:
        """Return the part of a dataset that a request selects. See `streamed.select` for errors.

        Raises:
            FilterRefused: The selection has rows and this process does not choose rows for clients.
        """
        if selection is not None and selection.rows is not None and not self._applies_filters:
            raise FilterRefused("this server does not apply filters: choose_rows=False")
        return select(whole, selection)

    def issue_ticket(self, dataset: Dataset, columns: Sequence[str] | None = None) -> Ticket:
        """Issue a ticket for a published dataset.

        Args:
            dataset: The dataset.
            columns: The only columns that the ticket grants. Default: all columns.

        Returns:
            The ticket, with its expiry.

        Raises:
            ColumnNotFound: The dataset lacks one of the columns.
            OptionError: `columns` is set and tickets are not signed.
        """
        if columns is not None:
            Selection(tuple(columns)).indices(dataset.schema.names)
        return self.tickets.sign(Grant(dataset.ticket, None if columns is None else tuple(columns)), self.now())

    def names(self) -> list[str]:
        """Return the names of all datasets that can be read, sorted."""
        with self._lock:
            return sorted(name for name, dataset in self._by_name.items() if not dataset.exhausted)

    def datasets(self) -> dict[str, list[Dataset]]:
        """Return every served dataset, by name, sorted. If several have the same name, the current one is the last."""
        by_name: dict[str, list[Dataset]] = {}
        with self._lock:
            for dataset in self._by_identifier.values():
                by_name.setdefault(dataset.name, []).append(dataset)
        return dict(sorted(by_name.items()))

    def close(self) -> list[Dataset]:
        """Stop serving all datasets.

        Returns:
            The datasets that were served, which the caller closes.
        """
        with self._lock:
            self._closed = True
            served = [*self._by_identifier.values()]
            self._by_name.clear()
            self._by_identifier.clear()
            self._by_part.clear()
        return served

    def _check_open(self) -> None:
        if self._closed:
            raise DissociatedError("the server is closed")
