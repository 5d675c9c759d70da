"""Sessions that a training loop calls to save, resume and recover, built on `cpr`."""
