"""Loading: from saved rows to live shards, whatever the sharding was when they were saved."""
