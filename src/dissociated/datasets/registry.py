"""What one process serves: the one owner of ticket -> dataset, and of name -> dataset.

Publishing, replacing, dropping, expiry and eviction each come here once. What a catalog says a dataset *is*, its
versions and parts, is in the catalog's database; this says what is served here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from dissociated.base.access import Grant, Signer, Ticket, Unsigned
from dissociated.datasets.base import Dataset
from dissociated.datasets.filtered import FilterRefused, select
from dissociated.datasets.sources import isolate_columns
from dissociated.errors import DatasetNotFound, DissociatedError
from dissociated.protocol.request import Selection


class Registry:
    """The datasets that a process serves, by the identifiers that `tickets` are made for, and by name.

    A part of a catalog's version is found by its id too, and need not have a name here. Whoever withdraws a dataset
    drops it: streams of it go on, but for a live one. Safe to use from many threads.
    """

    def __init__(self, tickets: Signer | Unsigned, chooses_rows: bool = True) -> None:
        self.tickets = tickets
        self._chooses_rows = chooses_rows
        self._lock = threading.Lock()
        self._closed = False
        self._by_name: dict[str, Dataset] = {}
        self._by_identifier: dict[bytes, Dataset] = {}
        self._by_part: dict[str, Dataset] = {}

    def publish(self, new: Dataset) -> Dataset | None:
        """Serve `new` under its name. Returns what had the name, which is served by its own ticket until withdrawn.

        Raises DissociatedError where another dataset has the ticket, or the registry is closed.
        """
        with self._lock:
            self._check_open()
            old = self._by_name.get(new.name)
            if self._by_identifier.get(new.ticket, old) is not old:
                raise DissociatedError(f"another dataset than {new.name!r} has this ticket already")
            self._by_name[new.name] = self._by_identifier[new.ticket] = new
            return old

    def serve(self, part: str, dataset: Dataset, named: bool = False) -> Dataset:
        """Serve the part of that id to whoever has its ticket: `dataset`, or what is served so already. Returns which.

        With `named` it is what has its name here, too. Raises DissociatedError where the registry is closed.
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
        """Let `part` be the id of a dataset that is published already."""
        with self._lock:
            self._by_part[part] = dataset

    def lookup_part(self, part: str) -> Dataset | None:
        """The dataset that is served as the part of that id; None where there is none."""
        with self._lock:
            return self._by_part.get(part)

    def withdraw(self, dataset: Dataset) -> None:
        """Serve `dataset` no more."""
        with self._lock:
            if self._by_identifier.get(dataset.ticket) is dataset:
                del self._by_identifier[dataset.ticket]
            if self._by_name.get(dataset.name) is dataset:
                del self._by_name[dataset.name]
        dataset.drop()

    def withdraw_parts(self, parts: Iterable[str]) -> None:
        """Serve the parts of these ids no more, as far as they are served."""
        with self._lock:
            datasets = [self._by_part.pop(part, None) for part in parts]
        for dataset in datasets:
            if dataset is not None:
                self.withdraw(dataset)

    def find_name(self, name: str) -> Dataset | None:
        """What is published under `name`, if anything is."""
        with self._lock:
            return self._by_name.get(name)

    def lookup_name(self, name: str) -> Dataset:
        """What is published under `name`. Raises DatasetNotFound, and DissociatedError where the registry is closed."""
        dataset = self.find_name(name)
        if dataset is None:
            self._check_open()
            raise DatasetNotFound(f"no dataset {name!r} is published here")
        return dataset

    def lookup(self, identifier: bytes) -> Dataset | None:
        """The dataset with this identifier, for which tickets are made; None where it is not served here."""
        with self._lock:
            return self._by_identifier.get(identifier)

    def resolve_ticket(self, ticket: bytes) -> tuple[Dataset, Dataset]:
        """What was published, and what of it this ticket is for.

        Raises DatasetNotFound, and AccessDenied for what is no ticket of this process, or not any more.
        """
        identifier, columns = self.tickets.check(ticket, time.time())
        dataset = self.lookup(identifier)
        if dataset is None:
            raise DatasetNotFound("no dataset has this ticket: it may have been replaced or dropped; look it up again")
        return dataset, dataset if columns is None else isolate_columns(dataset, columns)

    def select(self, whole: Dataset, selection: Selection | None) -> Dataset:
        """The part of a dataset that a request selects. Raises what `Dataset.select` raises, and FilterRefused."""
        if selection is not None and selection.rows is not None and not self._chooses_rows:
            raise FilterRefused("it was told not to choose rows")
        return select(whole, selection)

    def issue_ticket(self, dataset: Dataset, columns: Sequence[str] | None = None) -> Ticket:
        """A ticket for a publication, or for these columns of it, and when it expires.

        Raises ColumnNotFound, and OptionError where tickets say nothing of columns.
        """
        if columns is not None:
            Selection(tuple(columns)).indices(dataset.schema.names)
        return self.tickets.sign(Grant(dataset.ticket, None if columns is None else tuple(columns)), time.time())

    def names(self) -> list[str]:
        """The names of all datasets, sorted."""
        with self._lock:
            return sorted(self._by_name)

    def datasets(self) -> dict[str, list[Dataset]]:
        """Every dataset that is served, by name, sorted. Of several with one name, the present one is the last."""
        by_name: dict[str, list[Dataset]] = {}
        with self._lock:
            for dataset in self._by_identifier.values():
                by_name.setdefault(dataset.name, []).append(dataset)
        return dict(sorted(by_name.items()))

    def close(self) -> list[Dataset]:
        """Serve nothing from now on. Returns what was served, which the caller closes."""
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
