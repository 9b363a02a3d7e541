"""The split engine in torch: context once, candidates alone, on CUDA and on CPUs that the native kernel does not suit."""
