"""`import flash_allreduce_plugin.deepspeed.attach`, where the entry point is off: the section of the JSON configuration
counts from here on.

The one module of the package whose import does something: it imports DeepSpeed and wraps DeepSpeedEngine.__init__.
Import it before `deepspeed.initialize`.
"""

from __future__ import annotations

from flash_allreduce_plugin.integrations.deepspeed import engine

engine.attach()
