"""The Arrow IPC format: messages, schemas, footers and tensors, without pyarrow."""
