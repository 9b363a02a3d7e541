"""The endpoints, and what stands before them: connections, the one middleware, the caller."""
