"""The ranking transformer: configuration, plain definition, engine. Needs torch, numpy and safetensors, nothing else."""
