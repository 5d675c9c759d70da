"""Where files of a checkpoint become durable: local disks and object stores behind one interface."""
