"""One process: its sockets, signals and HTTP/1.1. Not for ranking."""
