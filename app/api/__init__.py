"""The endpoints, and what stands before them: connections, the middlewares, the caller."""
