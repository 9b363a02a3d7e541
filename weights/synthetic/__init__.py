"""Random weights for any architecture, and a small checkpoint of them."""
