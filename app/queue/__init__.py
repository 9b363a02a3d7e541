"""Engine threads and the model versions that they hold."""
