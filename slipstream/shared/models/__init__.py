"""Neural networks, built in or the user's own: construction, prediction, metrics and storage."""
