"""`python -m pallas_kernels` prints what runs where, and why."""

from pallas_kernels.dispatch import table

print(table())
