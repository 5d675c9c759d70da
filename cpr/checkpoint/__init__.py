"""How rows become durable and come back; `checkpointer` has the object that a training loop holds."""
