"""The checkpoint format on disk: manifest and tensor files, how they are checked and written."""
