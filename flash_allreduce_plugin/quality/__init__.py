"""Measure the error of live calls, and choose their widths by it."""
