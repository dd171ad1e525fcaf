"""Writes the fields by integration into docs/use/configuration.md, from the rows of the registry.

python -m scripts.make_field_matrix
"""

from __future__ import annotations

from pathlib import Path

from flash_allreduce_plugin.config.refusals import OF_MEGATRON
from flash_allreduce_plugin.integrations.contract import without_effect
from flash_allreduce_plugin.integrations.registry import ROWS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "use" / "configuration.md"
BEGIN, END = "<!-- fields by integration -->\n", "<!-- end -->"


def matrix() -> str:
    """Return the table: a row a field that acts in some integrations only, a column an integration."""
    lacking = {row.name: without_effect(row) for row in ROWS}
    fields = dict.fromkeys([*OF_MEGATRON, *(name for lacks in lacking.values() for name in lacks)])
    lines = ["|field|" + "|".join(f"`{row.name}`" for row in ROWS) + "|", "|---" * (len(ROWS) + 1) + "|"]
    lines += [
        f"|`{name}`|" + "|".join("" if name in lacking[row.name] else "●" for row in ROWS) + "|" for name in fields
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the table between its two marks."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(before + BEGIN + matrix() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
