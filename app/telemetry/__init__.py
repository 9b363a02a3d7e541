"""What the process says about itself: metrics, logs, traces."""
