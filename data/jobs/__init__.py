"""What jobs share: tasks on processes or a Dask cluster, durable files, folder locks, progress, commands."""
