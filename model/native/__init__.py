"""The CPU engine: a C++ kernel built on the machine it runs on, its weights packed once. Not for CUDA."""
