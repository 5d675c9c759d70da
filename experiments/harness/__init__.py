"""What experiments share: records of results, launches, networks, workers and data."""
