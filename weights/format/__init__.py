"""What lies on disk: manifest, tensors, reading with every check, writing in one step."""
