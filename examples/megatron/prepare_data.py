"""Text files to Megatron's .bin and .idx: one document a file, each byte a token, an end-of-document token after each.

python examples/megatron/prepare_data.py --output-prefix data/stdlib
python examples/megatron/prepare_data.py --output-prefix data/mine --text one.txt two.txt
"""

from __future__ import annotations

import argparse
import random
import sysconfig
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}  # encodings: tables


class ByteTokenizer:
    """Map each byte to a token, and add a token for the end of a document: the interface that GPTDataset requires."""

    eod = 256
    vocab_size = 257
    unique_identifiers = {"class": "ByteTokenizer"}  # noqa: RUF012 (part of the key of the cached indices)

    def tokenize(self, text: bytes) -> numpy.ndarray:
        """Return the tokens, uint16[len(text)]."""
        return numpy.frombuffer(text, numpy.uint8).astype(numpy.uint16)


def standard_library() -> list[Path]:
    """Return the sources of this Python's standard library, shuffled always in the same order.

    The validation set is cut from the end: in order of names it would be a few neighbours of one kind.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.rglob("*.py")) if not LEFT_OUT & set(file.relative_to(root).parts)]
    random.Random(0).shuffle(files)
    return files


def write_dataset(files: list[Path], prefix: str) -> tuple[int, int]:
    """Write prefix.bin and prefix.idx. Return (documents, tokens). Empty files are left out."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteTokenizer()
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=numpy.uint16)
    documents = tokens = 0
    for file in files:
        text = file.read_bytes()
        if text:
            document = numpy.append(tokenizer.tokenize(text), numpy.uint16(tokenizer.eod))
            builder.add_document(document, [len(document)])
            documents, tokens = documents + 1, tokens + len(document)
    builder.finalize(get_idx_path(prefix))
    return documents, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-prefix", required=True, metavar="PATH", help="PATH.bin and PATH.idx are written")
    parser.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE", help="default: the Python standard library's sources"
    )
    args = parser.parse_args()
    documents, tokens = write_dataset(args.text or standard_library(), args.output_prefix)
    print(f"{args.output_prefix}.bin, .idx: {documents} documents, {tokens} tokens")


if __name__ == "__main__":
    main()
