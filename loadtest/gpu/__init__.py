"""`make bench-gpu`: the split engine on one card. Needs torch, numpy, safetensors and, on CUDA, triton. Speaks no HTTP."""
