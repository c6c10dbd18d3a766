"""Who may pass, and when."""
