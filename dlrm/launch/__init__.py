"""The training process: versions, device, memory settings, exit codes and signals."""
