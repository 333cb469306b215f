"""Batches for training: NumPy arrays in shared memory that are shuffled and sharded, with positions to resume from.

    from dissociated.training import Batches

    for batch in Batches(client["flights"], columns=["distance", "dep_delay"], shuffle=True):
        ...

`dissociated.torch` converts these arrays into tensors.
"""

from dissociated.training.batches import Batches
from dissociated.training.columns import Lists
from dissociated.training.sampling import Sampling

__all__ = ["Batches", "Lists", "Sampling"]
