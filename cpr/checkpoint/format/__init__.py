"""The format on disk, see FORMAT.md: manifests, row files and state files."""
