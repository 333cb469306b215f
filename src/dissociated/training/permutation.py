"""Permutations that follow from seeds alone, in every release of NumPy: stored, or computed part by part."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Positions: TypeAlias = "npt.NDArray[np.int64]"

_ROUNDS = 6


class Permutation:
    """A permutation of the numbers below `length`, of which any part can be computed without the rest.

    Numbers with the bits that `length` needs are mixed by steps that can each be undone: multiplication by an odd
    number, addition, and an exclusive or with the number's own upper half. A result of `length` or more is mixed again
    until it is lower, which is still a permutation (known as cycle walking), and takes less than one more time on
    average.
    """

    def __init__(self, length: int, *seeds: int) -> None:
        self._length = np.uint64(length)
        bits = max(1, (length - 1).bit_length())
        self._mask, self._shift = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
        keys = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(2 * _ROUNDS)
        # The upper bits of the keys are used, which are more random than the lower bits.
        self._factors = (keys[:_ROUNDS] >> np.uint64(64 - bits)) | np.uint64(1)
        self._terms = keys[_ROUNDS:] >> np.uint64(64 - bits)

    def at(self, start: int, stop: int) -> Positions:
        """Return the numbers at the positions from `start` up to, but not including, `stop`."""
        numbers = np.arange(start, stop, dtype=np.uint64)
        self._mix(numbers)
        again = np.flatnonzero(numbers >= self._length)
        while again.size:
            part = numbers[again]
            self._mix(part)
            numbers[again] = part
            again = again[part >= self._length]
        return numbers.view(np.int64)

    def _mix(self, numbers: npt.NDArray[np.uint64]) -> None:
        """Map the numbers, in place, to others with as many bits."""
        upper = np.empty_like(numbers)
        for factor, term in zip(self._factors, self._terms, strict=True):
            numbers *= factor
            numbers += term
            numbers &= self._mask
            np.right_shift(numbers, self._shift, out=upper)
            numbers ^= upper


def shuffled(length: int, *seeds: int) -> Positions:
    """Return a permutation of the numbers below `length`, stored.

    NumPy guarantees the output of a bit generator across releases, but not the results of its own `permutation`.
    """
    keys = np.random.PCG64(np.random.SeedSequence(seeds)).random_raw(length)
    return np.argsort(keys, kind="stable").astype(np.int64, copy=False)
