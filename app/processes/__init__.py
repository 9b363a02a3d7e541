"""Several processes: uvicorn workers that speak HTTP, before one engine process that ranks."""
