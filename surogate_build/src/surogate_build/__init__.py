"""What packages with kernels are built with: the build backend, CMake functions, headers and shared sources."""
