"""The queue: who gets a place in it, what the next forward computes, and the threads and versions of the engines."""
