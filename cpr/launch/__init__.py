"""`cpr run`: starts torchrun, and starts it again when it is killed."""
