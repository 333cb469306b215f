"""Train with batches of tensors from shared memory: shuffled, and without a copy if they are not."""

import numpy as np
import pyarrow as pa
import torch

import dissociated as dis
from dissociated.torch import loader

x = np.linspace(-1, 1, 10_000, dtype=np.float32)
table = pa.table({"x": x, "y": 3 * x + 2})

with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
    server.publish("points", table, wait=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):  # epochs
        for batch in loader(client["points"], batch_size=100, shuffle=True):
            loss = torch.nn.functional.mse_loss(model(batch["x"][:, None])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"y = {model.weight.item():.2f} x + {model.bias.item():.2f}")
