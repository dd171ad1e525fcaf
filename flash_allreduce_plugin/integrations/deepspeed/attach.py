"""`import flash_allreduce_plugin.deepspeed.attach`: make the JSON section work without entry point.

This is the only module of the package with an effect at import: it imports DeepSpeed and wraps
DeepSpeedEngine.__init__. Import it before `deepspeed.initialize`.
"""

from __future__ import annotations

from flash_allreduce_plugin.integrations.deepspeed import engine

engine.attach()
