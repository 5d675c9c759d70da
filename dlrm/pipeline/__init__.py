"""Schedules of a training step: what is exchanged and looked up while the model computes.

`schedules` and `tick_tock` have those that `train.pipeline` names; `collection` lets sharded collections of a
model work ahead of its forward pass; `corrections` sends rows again that changed meanwhile.
"""
