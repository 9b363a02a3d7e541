"""The operations of the split engine: plain definitions, fixed tiles in torch, Triton. Imports nothing by itself."""
