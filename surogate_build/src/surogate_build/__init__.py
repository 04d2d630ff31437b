"""Tools to build packages with kernels: the build backend, CMake functions, headers and shared sources."""
