"""The functions that a user calls, and the checks of their arguments."""
