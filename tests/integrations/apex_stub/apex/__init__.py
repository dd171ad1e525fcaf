"""A stand-in for NVIDIA's apex 25.05 on CPU, for the tests of its seams.

Files, names, parameters and the order of collectives, divisions and copies are those of apex.parallel (which needs
CUDA to run): the first backward pass reduces everything at its end, one bucket a dtype, and settles the buckets that
later passes reduce while they fill. Streams are left out, `prof` and options that apex refuses do nothing.
"""

from . import parallel as parallel
