"""The server under test: its process, its address, its own figures."""
