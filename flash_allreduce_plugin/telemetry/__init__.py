"""The record of a run: counters, the log file, TensorBoard, and the lines that rank 0 prints."""
