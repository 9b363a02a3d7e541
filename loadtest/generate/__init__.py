"""Makes requests and sends them on a schedule: traffic, bodies, arrivals, an HTTP client, open and closed loops."""
