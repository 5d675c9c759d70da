"""CPR: fault tolerance for TorchRec models whose embedding tables are sharded over many workers.

It works on any `DistributedModelParallel` model and never imports the trainer that comes with it.
"""
