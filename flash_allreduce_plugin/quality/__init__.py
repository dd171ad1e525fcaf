"""Measures the error of live calls, and chooses their widths by it."""
