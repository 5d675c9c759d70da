"""The process around a training run: exit codes, signals, memory settings, package versions, device."""
