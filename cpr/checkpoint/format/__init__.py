"""The format of checkpoint files, see FORMAT.md: manifests, row files and state files."""
