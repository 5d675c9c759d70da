"""Sums of dense gradients over slow links in fewer bytes, for this trainer and for any DDP model.

A rank's dense gradient is one flat fp32 vector. A compressor selects values, a codec encodes them, a
collective sums them over all ranks, error feedback keeps the rest, and a tuner finds the fastest combination.
Apart from torch, the package uses only field checks of `cpr`.

Throughout, `group` is a process group, with None for all ranks; `device` is the device of the gradients, on
which the group's backend exchanges tensors; `buffers` is memory that several collectives share.
"""
