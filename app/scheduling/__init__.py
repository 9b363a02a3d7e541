"""Who may join the queue and what runs next: pure policy with a clock handed in. Knows no torch and no HTTP."""
