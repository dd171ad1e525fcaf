"""The quantized collectives, run as a Plan says: they read no environment, no globals and no framework."""
