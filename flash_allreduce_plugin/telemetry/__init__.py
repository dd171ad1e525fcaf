"""What a run did: counters, the log file, TensorBoard, and the lines that rank 0 prints."""
