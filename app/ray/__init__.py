"""The service on Ray Serve: an ingress, a consistent-hash router, and replicas that are each the whole service. See docs/scaling.md."""
