"""The error of live calls: how it is measured, and the decisions that follow from it."""
