"""The configuration: its fields, and reading them from Python, flags, JSON and the environment."""

from flash_allreduce_plugin.config.fields import FlashConfig as FlashConfig
