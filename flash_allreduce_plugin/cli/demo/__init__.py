"""flash-allreduce demo: trains a small model in full precision and quantized, and compares."""
