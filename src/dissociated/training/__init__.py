"""Batches for training: NumPy arrays in shared memory, shuffled, sharded, and resumed where a run was interrupted.

    from dissociated.training import Batches

    for batch in Batches(client["flights"], columns=["distance", "dep_delay"], shuffle=True):
        ...

`dissociated.torch` makes tensors of them.
"""

from dissociated.training.batches import Batches, Sampling

__all__ = ["Batches", "Sampling"]
