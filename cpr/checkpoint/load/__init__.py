"""Loading: from saved states to a live model, under any sharding plan and on any number of ranks."""
