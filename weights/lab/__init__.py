"""What learns from a log and judges: training, evaluation, scoring, the synthetic world. The service never imports it."""
