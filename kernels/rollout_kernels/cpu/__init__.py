"""The compiled CPU kernels: C++ sources, their build and their bindings."""
