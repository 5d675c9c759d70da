"""The trainer: DLRM and its family on sharded embedding tables. Its front door: `torchrun -m dlrm.train`."""
