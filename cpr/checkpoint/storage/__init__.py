"""Storage of checkpoint files: local disks and object stores behind one interface."""
