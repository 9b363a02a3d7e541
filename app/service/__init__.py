"""The ranking service without HTTP: admission, life, health, swaps; `interface` is what HTTP sees of it."""
