"""Write patches/: the seams as source diffs, one file a release of DeepSpeed.

    python -m scripts.make_deepspeed_patches             # the releases of RELEASES, downloaded
    python -m scripts.make_deepspeed_patches 0.18.9      # another one

Nothing of DeepSpeed is installed or imported.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from flash_allreduce_plugin.integrations.deepspeed import engine
from scripts import make_megatron_patches
from scripts.check_deepspeed_versions import reader, spelled
from scripts.releases import Read

RELEASES = ("0.17.6", "0.19.8")
PATCHES = make_megatron_patches.PATCHES
IMPORT = "from flash_allreduce_plugin.deepspeed import source as flash_allreduce"


def main(releases: list[str]) -> None:
    with tempfile.TemporaryDirectory() as archives:
        for release in releases or RELEASES:
            target = PATCHES / f"deepspeed-{release}.patch"
            target.write_text(patch(reader(release, Path(archives))), encoding="utf-8")
            print(target)


def patch(read: Read) -> str:
    """A unified diff (for `git apply`, or `patch -p1`) that marks the place of every seam."""
    return make_megatron_patches.patch(read, spelled(engine.seams()), IMPORT)


if __name__ == "__main__":
    main(sys.argv[1:])
