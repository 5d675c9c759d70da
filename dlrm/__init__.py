"""The trainer: DLRM and its family on sharded embedding tables. `torchrun -m dlrm.train` is its front door."""
