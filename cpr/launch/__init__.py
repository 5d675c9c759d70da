"""`cpr run`: starts torchrun, and restarts it when it is killed."""
