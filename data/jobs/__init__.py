"""What `data.prepare` and `data.synthetic` share: worker processes, durable files, and folders of jobs."""
