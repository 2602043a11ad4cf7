"""The same operators in Numba, one file per operator, with the stems and names of device_kernels."""
