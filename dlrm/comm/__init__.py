"""Sums of dense gradients over slow links, in fewer bytes: for this trainer, and for anybody's DDP model.

A rank's dense gradient is one flat fp32 vector. A compressor picks what of it travels, a collective sums
that over all ranks, a memory keeps the rest for later, and a planner says when none of it is worth its time.
Imports torch, and nothing else of this repository.
"""
