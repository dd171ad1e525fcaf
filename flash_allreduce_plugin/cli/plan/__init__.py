"""flash-allreduce plan: estimates the effect of quantizing on a planned cluster."""
