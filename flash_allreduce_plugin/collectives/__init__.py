"""The quantized collectives. A Plan decides how a call runs; nothing here reads the environment or a framework."""
