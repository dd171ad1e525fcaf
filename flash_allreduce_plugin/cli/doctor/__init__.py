"""flash-allreduce doctor: finds the problems of an installation."""
