"""CUDA C++ kernels and their launchers; they take tensors and ints and know no zos object."""
