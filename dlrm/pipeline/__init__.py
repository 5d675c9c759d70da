"""Schedules of a training step: what is exchanged and looked up while the model computes.

`schedules` has those that `train.pipeline` names; `ahead` lets the sharded collections of a model work ahead
of its forward pass; `corrections` sends rows again that changed meanwhile.
"""
