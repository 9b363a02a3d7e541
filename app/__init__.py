"""The HTTP service around the model: schema, admission, batching, metrics, errors. Reads no checkpoint format itself."""
